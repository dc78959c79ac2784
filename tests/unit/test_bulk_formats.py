"""Bulk inputs of every shape come out as the same checked lines."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import RequestError
from workers.bulk_formats import Shape, check_shape, fill_template, guess_format, read_rows, template_columns
from workers.bulk_input import OUTPUT_FIELDS, BulkLine, LineError, LineOptions
from workers.payload import GeneratePayload

OPTIONS = LineOptions(defaults={"model": "smollm2"})
TABLE = [
    {"id": "a", "text": "good, really", "stars": "5"},
    {"id": "b", "text": 'he said "no"\nand left', "stars": ""},
    {"id": "c", "text": "naïve", "stars": "2"},
]


def csv_of(rows: list[dict[str, str]]) -> io.BytesIO:
    import csv

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return io.BytesIO(text.getvalue().encode("utf-8-sig"))


def parquet_of(rows: list[dict[str, Any]]) -> io.BytesIO:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    file.seek(0)
    return file


def openai_line(custom_id: str, **body: Any) -> dict[str, Any]:
    whole = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


def jsonl_of(*rows: dict[str, Any]) -> io.BytesIO:
    return io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_template_makes_prompts_of_rows_and_columns_are_carried(kind: Any) -> None:
    shape = Shape(kind, template="Stars for {{it}}: {text}", system="Be strict.", id_column="id")
    file = csv_of(TABLE) if kind == "csv" else parquet_of(TABLE)
    check_shape(shape, file)
    rows = list(read_rows(file, shape, OPTIONS))
    assert [row.custom_id for row in rows] == ["a", "b", "c"]
    first, second, _ = rows
    assert isinstance(first, BulkLine)
    assert isinstance(second, BulkLine)
    assert first.payload.messages is not None
    assert [(turn.role, turn.content) for turn in first.payload.messages] == [
        ("system", "Be strict."),
        ("user", "Stars for {it}: good, really"),
    ]
    assert first.extra == {"id": "a", "input_text": "good, really", "stars": "5"}
    assert second.extra == {"id": "b", "input_text": 'he said "no"\nand left'}, "an empty cell is nothing"
    assert list(read_rows(_again(file), shape, OPTIONS, after=2)) == rows[2:]


def _again(file: io.BytesIO) -> io.BytesIO:
    file.seek(0)
    return file


def test_columns_called_like_fields_are_fields_without_a_template() -> None:
    file = csv_of([{"prompt": "one", "max_tokens": "7"}, {"prompt": "two", "max_tokens": "many"}])
    shape = Shape("csv")
    check_shape(shape, file)
    good, bad = read_rows(file, shape, OPTIONS)
    assert isinstance(good, BulkLine)
    assert (good.custom_id, good.payload.max_tokens) == ("row-1", 7)
    assert isinstance(bad, LineError)
    assert (bad.line, bad.custom_id) == (2, "row-2")
    assert "max_tokens" in bad.message


def test_broken_rows_are_errors_of_their_own() -> None:
    shape = Shape("csv", template="{a}")
    rows = list(read_rows(io.BytesIO(b"a,b\n1,2\n1,2,3\n\n4,5\n"), shape, OPTIONS))
    assert [type(row) for row in rows] == [BulkLine, LineError, BulkLine]
    latin = list(read_rows(io.BytesIO(b"a\ncaf\xe9\n"), shape, OPTIONS))
    assert isinstance(latin[-1], LineError)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape("csv"), "--template: is needed"),
        (Shape("csv", template="{colour}"), "--template: names a column"),
        (Shape("csv", template="{text}", id_column="key"), "--id-column: names a column"),
        (Shape("csv", template="{text.upper}"), "--template: names a column"),
        (Shape("csv", template="{text!r}"), "--template: is malformed"),
        (Shape("csv", template="{text"), "--template: is malformed"),
        (Shape("csv", template="{}"), "--template: is malformed"),
        (Shape("csv", template="Say something {{new}}."), "--template: names no column"),
        (Shape("jsonl", template="{text}"), "--template: is for tables"),
    ],
)
def test_options_that_do_not_fit_the_file(shape: Shape, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_shape(shape, csv_of(TABLE))


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_a_table_with_other_separators_than_commas_is_told_apart(sign: str, name: str) -> None:
    file = io.BytesIO(f"id{sign}text\n1{sign}Good, but slow\n".encode())
    with pytest.raises(RequestError, match=f"separated by {name}.* commas"):
        check_shape(Shape("csv", template="{text}"), file)
    check_shape(Shape("csv", template="{text}"), io.BytesIO(b"text\na;b\n"))  # in the cells it is text


def test_openai_lines_are_taken_as_they_are() -> None:
    file = jsonl_of(
        openai_line("one", max_tokens=5, temperature=0),
        openai_line("two", tools=[{"type": "function"}]),
        openai_line("three", n=2),
        openai_line("four") | {"url": "/v1/embeddings"},
        openai_line("five") | {"method": "GET"},
        {"custom_id": "six", "prompt": "ours"},
        {
            "custom_id": "seven",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "smollm2", "prompt": "Once"},
        },
    )
    assert guess_format("batch.jsonl", file) == "openai"
    one, two, three, four, five, six, seven = read_rows(file, Shape("openai"), OPTIONS)
    assert isinstance(one, BulkLine)
    assert (one.payload.max_tokens, one.payload.temperature, one.payload.priority) == (5, 0, 6)
    assert isinstance(seven, BulkLine)
    assert seven.payload.prompt == "Once"
    assert seven.extra == {"url": "/v1/completions"}
    for row, what in ((two, "tools"), (three, "n:"), (four, "url"), (five, "method"), (six, "method")):
        assert isinstance(row, LineError)
        assert what in row.message
        assert row.custom_id is not None


GRAMMARS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"stream": True}, "unsupported_parameter", r"body: stream: .*\(got True\)\. Leave it out"),
        ({"service_tier": "priority"}, "unsupported_parameter", "service_tier: .*'priority'.*Leave it out"),
        *(
            ({"response_format": each}, "unsupported_parameter", "response_format: .*got.*Leave")
            for each in GRAMMARS
        ),
    ],
)
def test_what_an_openai_line_would_ask_for_in_vain_is_an_error(
    body: dict[str, object], code: str, message: str
) -> None:
    good, bad = read_rows(
        jsonl_of(openai_line("good", stream=False, service_tier="flex"), openai_line("bad", **body)),
        Shape("openai"),
        OPTIONS,
    )
    assert isinstance(good, BulkLine)
    assert isinstance(bad, LineError)
    assert (bad.custom_id, bad.code) == ("bad", code)
    assert re.search(message, bad.message)


def test_openai_lines_for_another_endpoint_than_the_batch_s_are_errors() -> None:
    shape = Shape("openai", endpoint="/v1/completions")
    chat, completion = read_rows(
        jsonl_of(
            openai_line("chat"),
            openai_line("completion")
            | {"url": "/v1/completions", "body": {"model": "smollm2", "prompt": "Once"}},
        ),
        shape,
        OPTIONS,
    )
    assert isinstance(chat, LineError)
    assert chat.message.startswith("url: is not the endpoint of the batch (got '/v1/chat/completions')")
    assert isinstance(completion, BulkLine)


def test_the_format_is_told_from_the_file(tmp_path: Path) -> None:
    assert guess_format("x.csv", io.BytesIO()) == "csv"
    assert guess_format("x.parquet", io.BytesIO()) == "parquet"
    assert guess_format("x.jsonl", jsonl_of({"custom_id": "a", "prompt": "b"})) == "jsonl"
    assert guess_format("-", io.BytesIO(b"garbage")) == "jsonl"


OURS = json.dumps({"custom_id": "a", "url": "https://example.org", "body": "text", "prompt": "b"}).encode()
LONG = json.dumps(openai_line("a", messages=[{"role": "user", "content": "x" * (2 << 20)}])).encode()
SHORT = json.dumps(openai_line("b")).encode()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b"", b"  ", SHORT], "openai"),
        ([LONG, SHORT], "openai"),
        ([b"{oops", SHORT], "openai"),
        ([b"\xff", b"[1]", b'{"custom_id": "no url"}', SHORT], "openai"),
        ([b"\xef\xbb\xbf" + SHORT], "openai"),
        ([OURS, SHORT], "jsonl"),
        ([b"", b"{oops"], "jsonl"),
    ],
)
def test_the_first_line_that_tells_decides_on_the_format(lines: list[bytes], expected: str) -> None:
    file = io.BytesIO(b"\n".join(lines))
    assert guess_format("batch.jsonl", file) == expected
    assert file.tell() == 0


def test_a_line_that_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.bulk_input.MAX_LINE_BYTES", len(SHORT) + 1)
    assert guess_format("batch.jsonl", io.BytesIO(OURS * 3 + b"\n" + SHORT + b"\n")) == "openai"


MEANINGS = [*GeneratePayload.model_fields, *OUTPUT_FIELDS, "max_token", "line", "note"]
COLUMNS = st.tuples(st.sampled_from(["", "input_", "input_input_"]), st.sampled_from(MEANINGS)).map("".join)


@given(st.lists(COLUMNS, min_size=1, max_size=12, unique=True), st.booleans())
def test_every_column_of_a_table_comes_out_under_a_name_of_its_own(columns: list[str], named: bool) -> None:
    table = [{name: f"{row}-{name}" for name in columns} for row in ("one", "two")]
    for name in columns[1:]:
        table[1][name] = ""
    shape = Shape("csv", template=f"{{{columns[0]}}}", id_column=columns[0] if named else None)
    whole, bare = read_rows(csv_of(table), shape, OPTIONS)
    assert isinstance(whole, BulkLine)
    assert isinstance(bare, BulkLine)
    used = set() if named else {"one-custom_id"}
    if columns[0] == "custom_id":
        used = {"one-custom_id"}  # it is the id, however that was said
    assert sorted(whole.extra.values()) == sorted({*table[0].values()} - used)
    assert bare.extra.keys() <= whole.extra.keys(), "an empty cell gives no other column its name"
    assert [value.removeprefix("two-") for value in bare.extra.values()] in ([columns[0]], [])


def test_a_column_with_a_meaning_gets_a_name_that_no_other_has() -> None:
    file = csv_of([{"id": "a", "text": "one", "input_text": "two", "custom_id": "c", "top_k": "5"}])
    (row,) = read_rows(file, Shape("csv", template="{text}", id_column="id"), OPTIONS)
    assert row.custom_id == "a"
    assert row.extra == {
        "id": "a",
        "input_input_text": "one",
        "input_text": "two",
        "input_custom_id": "c",
        "input_top_k": "5",
    }
    (row,) = read_rows(
        csv_of([{"id": "a", "prompt": "x", "custom_id": "c"}]), Shape("csv", id_column="id"), OPTIONS
    )
    assert (row.custom_id, row.extra) == ("a", {"id": "a", "input_custom_id": "c"})


names = st.text(
    st.characters(exclude_characters="{}!:.[]", exclude_categories=["Cs"]), min_size=1, max_size=8
)


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), names), max_size=5), st.data())
def test_a_template_is_its_text_with_the_values(parts: list[tuple[str, str]], data: st.DataObject) -> None:
    template = "".join(text.replace("{", "{{").replace("}", "}}") + "{" + name + "}" for text, name in parts)
    row = {name: data.draw(st.one_of(st.none(), st.text(), st.integers())) for _, name in parts}
    assert template_columns(template) == [name for _, name in parts]
    expected = "".join(text + ("" if row[name] is None else str(row[name])) for text, name in parts)
    assert fill_template(template, row) == expected
