"""Bulk lines: what is read, what is carried through, and how each kind of bad line is named."""

from __future__ import annotations

import io
import json
import sys
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import UnknownModelError
from workers import bulk_input
from workers.bulk_input import (
    MAX_DEPTH,
    BulkInputError,
    BulkLine,
    LineError,
    LineOptions,
    distinct,
    parse_line,
    read_carried,
    read_lines,
    validate,
)
from workers.payload import GeneratePayload

OPTIONS = LineOptions(defaults={"model": "smollm2"})
RAW = LineOptions(defaults={"model": "smollm2"}, chat=False)


def file_of(*lines: dict[str, Any] | str | bytes) -> io.BytesIO:
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    return io.BytesIO(b"\n".join(encoded) + b"\n")


def test_what_is_not_read_to_its_end_may_be_closed_by_any_thread() -> None:
    rows = distinct(read_lines(file_of({"prompt": "a"}, {"prompt": "b"}), OPTIONS))
    next(rows)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            rows.close()  # type: ignore[attr-defined]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not errors


def one(line: dict[str, Any] | str | bytes, options: LineOptions = OPTIONS) -> BulkLine | LineError:
    (item,) = read_lines(file_of(line), options)
    return item


def good(line: dict[str, Any], options: LineOptions = OPTIONS) -> BulkLine:
    item = one(line, options)
    assert isinstance(item, BulkLine), item
    return item


def bad(line: dict[str, Any] | str | bytes, options: LineOptions = OPTIONS) -> LineError:
    item = one(line, options)
    assert isinstance(item, LineError), item
    return item


def test_a_prompt_becomes_a_chat_message_unless_told_otherwise() -> None:
    line = {"custom_id": "a", "prompt": "Name a colour."}
    chat = good(line).payload
    assert chat.prompt is None
    assert chat.messages is not None
    assert [(turn.role, turn.content) for turn in chat.messages] == [("user", "Name a colour.")]
    raw = good(line, RAW).payload
    assert (raw.prompt, raw.messages) == ("Name a colour.", None)


def test_messages_and_token_ids_are_taken_as_they_are() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    messages = good({"custom_id": "a", "messages": turns}).payload.messages
    assert [turn.model_dump() for turn in messages or ()] == turns
    assert good({"custom_id": "a", "token_ids": [1, 2]}).payload.token_ids == (1, 2)


def test_defaults_fill_only_what_a_line_leaves_out() -> None:
    options = LineOptions(defaults={"model": "smollm2", "max_tokens": 7})
    assert good({"custom_id": "a", "prompt": "x"}, options).payload.max_tokens == 7
    assert good({"custom_id": "a", "prompt": "x", "max_tokens": 9}, options).payload.max_tokens == 9
    assert good({"custom_id": "a", "prompt": "x"}).payload.priority == 6
    assert good({"custom_id": "a", "prompt": "x", "priority": 1}).payload.priority == 1


def test_other_keys_are_carried_through() -> None:
    line = good({"custom_id": "a", "prompt": "x", "answer": "18", "meta": {"source": [1, None]}})
    assert line.extra == {"answer": "18", "meta": {"source": [1, None]}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"custom_id": "a", "prompt": "x", "max_token": 3},
            "max_token: unknown field. Did you mean max_tokens",
        ),
        ({"custom_id": "a", "promt": "x"}, "promt: unknown field. Did you mean prompt"),
        ({"custom_id": "a", "prompt": "x", "top-k": 3}, "Did you mean top_k"),
        (
            {"custom_id": "a", "prompt": "x", "text": "y"},
            "text: is the name of a field that the output line gets",
        ),
        ({"prompt": "x"}, "custom_id: required field is missing"),
        ({"custom_id": 3, "prompt": "x"}, "custom_id: must be text"),
        ({"custom_id": "", "prompt": "x"}, "custom_id:"),
        ({"custom_id": "a"}, "give exactly one of prompt, messages and token_ids"),
        ({"custom_id": "a", "prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "exactly one"),
        ({"custom_id": "a", "prompt": "x", "token_ids": [1]}, "exactly one"),
        ({"custom_id": "a", "prompt": ""}, "prompt: must not be empty"),
        ({"custom_id": "a", "prompt": "a\x00b"}, "prompt: contains a NUL character at position 1"),
        ({"custom_id": "a", "prompt": "\ud800"}, "prompt: contains a lone surrogate"),
        ({"custom_id": "a", "prompt": "x", "note": "\ud800"}, "note: contains a lone surrogate"),
        (
            {"custom_id": "a", "prompt": "x", "version": 2},
            "version: is the payload's, and must be 1 (got 2). Leave",
        ),
        ({"custom_id": "a", "prompt": 5}, "prompt: must be text"),
        ({"custom_id": "a", "prompt": "x", "max_tokens": 0}, "max_tokens:"),
        ({"custom_id": "a", "prompt": "x", "temperature": -1}, "temperature:"),
        ({"custom_id": "a", "prompt": "x", "top_p": 0}, "top_p:"),
        ("[1, 2]", "must be a JSON object, not list"),
        ('{"custom_id": "a"', "is not valid JSON"),
        (
            "{oops}\n",
            "is not valid JSON: expecting property name enclosed in double quotes at character 2. Write",
        ),
        ("[\n", "is not valid JSON: expecting value at its end. Write one object a line"),
        ('{"custom_id": "a", "prompt": "x", "temperature": NaN}', "NaN is not a JSON value"),
        ('{"custom_id": "a", "prompt": "x", "prompt": "y"}', "the key 'prompt' comes twice"),
        (b'{"custom_id": "\xff"}', "is not UTF-8 at byte 15"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"custom_id": "a", "prompt": "x", "score": [1e999]}',
            "score: holds a number beyond what a double can",
        ),
    ],
)
def test_a_bad_line_says_what_and_how_to_mend_it(line: dict[str, Any] | str | bytes, message: str) -> None:
    error = bad(line)
    assert message in error.message
    assert error.line == 1


def test_nesting_is_refused_long_before_python_gives_up_on_it() -> None:
    """Else the same line passes here and is too deep for whoever reads or writes it from further down the stack."""
    inside = MAX_DEPTH - 1  # of the line's own object
    deepest = one('{"custom_id": "a", "prompt": "[[{{", "tree": ' + "[" * inside + "]" * inside + "}")
    assert json.dumps(deepest.extra["tree"]).count("[") == inside
    for opening, closing in (("[", "]"), ('{"a": ', "}")):
        for levels in range(inside + 1, sys.getrecursionlimit() + 2):
            line = '{"prompt": "x", "tree": ' + opening * levels + "1" + closing * levels + "}"
            assert "nested too deeply" in bad(line).message
            assert list(read_carried(file_of(line))) == []


def test_strict_refuses_every_unknown_key() -> None:
    strict = LineOptions(defaults={"model": "smollm2"}, strict=True)
    assert "answer: unknown field" in bad({"custom_id": "a", "prompt": "x", "answer": "18"}, strict).message


def test_a_check_of_the_callers_is_reported_with_its_line() -> None:
    def refuse(payload: GeneratePayload) -> None:
        raise UnknownModelError("is not served here", field="model", value=payload.model)

    error = bad({"custom_id": "a", "prompt": "x"}, LineOptions(defaults={"model": "m"}, check=refuse))
    assert (error.code, error.custom_id) == ("unknown_model", "a")


def test_one_bad_line_spoils_no_other_and_blank_lines_keep_their_number() -> None:
    lines = file_of({"custom_id": "a", "prompt": "x"}, "", b"\xff", "{", {"custom_id": "b", "prompt": "y"})
    kinds = [(type(item).__name__, item.line) for item in read_lines(lines, OPTIONS)]
    assert kinds == [("BulkLine", 1), ("LineError", 3), ("LineError", 4), ("BulkLine", 5)]


def test_an_overlong_line_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_input, "MAX_LINE_BYTES", 64)
    lines = file_of({"custom_id": "a", "prompt": "x" * 500}, {"custom_id": "b", "prompt": "y"})
    first, second = read_lines(lines, OPTIONS)
    assert isinstance(first, LineError)
    assert "is longer than 64 bytes" in first.message
    assert isinstance(second, BulkLine)
    assert second.line == 2


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = io.BytesIO(b"\xef\xbb\xbf" + b'{"custom_id": "a", "prompt": "x"}\r\n')
    (item,) = read_lines(lines, OPTIONS)
    assert isinstance(item, BulkLine)


def test_limit_and_after_count_in_lines_of_the_file() -> None:
    rows = [{"custom_id": str(n), "prompt": "x"} for n in range(10)]
    options = LineOptions(defaults={"model": "smollm2"}, limit=5)
    assert [item.line for item in read_lines(file_of(*rows), options)] == [1, 2, 3, 4, 5]
    assert [item.line for item in read_lines(file_of(*rows), options, after=3)] == [4, 5]


def test_validation_names_the_line_of_each_first_use() -> None:
    rows = [{"custom_id": name, "prompt": "x"} for name in ("a", "b", "a")]
    found = validate(distinct(read_lines(file_of(*rows), OPTIONS)))
    assert (found.lines, found.num_errors) == (3, 1)
    assert found.errors[0].line == 3
    assert "was used in line 1 (got 'a')" in found.errors[0].message
    assert found.errors[0].code == "duplicate_custom_id"


def test_validation_reports_the_extra_keys_and_only_some_of_many_errors() -> None:
    rows: list[dict[str, Any] | str] = ["{"] * 50
    found = validate(
        distinct(read_lines(file_of({"custom_id": "a", "prompt": "x", "answer": 1}, *rows), OPTIONS)),
        shown_errors=3,
    )
    assert found.extra_keys == {"answer"}
    assert (found.num_errors, len(found.errors)) == (50, 3)
    text = str(BulkInputError("in.jsonl", found.errors, found.num_errors))
    assert "50 bad lines, nothing was started" in text
    assert "in.jsonl:2: is not valid JSON" in text
    assert "and 47 more" in text


def test_validation_needs_no_more_memory_for_a_longer_file() -> None:
    class Endless(io.RawIOBase):
        """Lines made as they are read, so that the file itself takes no memory."""

        def __init__(self, count: int) -> None:
            self.left = count

        def readline(self, size: int | None = -1, /) -> bytes:
            self.left -= 1
            return b"" if self.left < 0 else b'{"custom_id": "line-%d", "prompt": "x"}\n' % self.left

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            assert validate(distinct(read_lines(Endless(count), OPTIONS))).lines == count  # type: ignore[arg-type]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(500)  # caches of the libraries
    assert peak(4000) < peak(500) + 200_000


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=30)


@given(
    custom_id=texts,
    prompt=texts,
    extra=st.dictionaries(
        texts.map(lambda text: f"a column called {text}"), st.none() | st.booleans() | texts | st.integers()
    ),
    ascii_only=st.booleans(),
)
def test_any_storable_line_survives_the_round_trip(
    custom_id: str, prompt: str, extra: dict[str, Any], ascii_only: bool
) -> None:
    raw = json.dumps({"custom_id": custom_id, "prompt": prompt} | extra, ensure_ascii=ascii_only)
    item = parse_line(1, raw.encode(), RAW)
    assert isinstance(item, BulkLine)
    assert (item.custom_id, item.payload.prompt, item.extra) == (custom_id, prompt, extra)
