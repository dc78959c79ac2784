"""No row of a table is lost: each comes out as a line that can be run, or as an error that says where and why."""

from __future__ import annotations

import csv
import gc
import io
import json
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.api import RequestError
from workers import bulk_tables
from workers.bulk_formats import Shape, check_shape, read_carried_rows, read_rows
from workers.bulk_input import BulkLine, LineError, LineOptions
from workers.bulk_tables import column_names, table_rows

OPTIONS = LineOptions(defaults={"model": "smollm2"})


def csv_rows(text: bytes, **shape: Any) -> list[BulkLine | LineError]:
    kind = Shape("csv", **{"template": "{text}", "id_column": "id", **shape})
    file = io.BytesIO(text)
    check_shape(kind, file)
    return list(read_rows(file, kind, OPTIONS))


def many(spoilt: bytes) -> bytes:
    """A thousand rows, number 500 as given."""
    rows = [b"%d,word%d" % (n, n) for n in range(1, 1001)]
    rows[499] = spoilt
    return b"id,text\n" + b"\n".join(rows) + b"\n"


@pytest.mark.parametrize(
    ("spoilt", "custom_id", "message"),
    [
        (b"500,caf\xe9", "500", "in the column 'text'. Re-encode the file (line 501 of the file)"),
        (b"500,one,two", "500", "has more cells than there are columns"),
        (b'500,"he said "no""', None, "is not readable as CSV"),
        (b"500,a\x00b", "500", "contains a NUL character"),
        (b"500", "500", "text: holds nothing"),
        (b"500,", "500", "text: is empty"),
        (b",word", None, "id: is empty"),
        (b"500," + b"x" * (bulk_tables.MAX_CELL + 1), None, "field larger than field limit"),
    ],
)
def test_one_bad_row_spoils_no_other(spoilt: bytes, custom_id: str | None, message: str) -> None:
    found = csv_rows(many(spoilt))
    assert [row.line for row in found] == list(range(1, 1001))
    (bad,) = [row for row in found if isinstance(row, LineError)]
    assert (bad.line, bad.custom_id) == (500, custom_id)
    assert message in bad.message


def test_a_byte_that_is_no_text_leaves_the_row_its_other_cells() -> None:
    (bad,) = csv_rows(b"id,text,answer\n\xe9,one,18\n")
    assert isinstance(bad, LineError)
    assert bad.extra == {"input_text": "one", "answer": "18"}
    assert bad.custom_id is None


def test_a_quote_that_is_never_closed_takes_lines_along_and_says_which() -> None:
    found = csv_rows(many(b'500,"oops'))
    assert len(found) == 500
    bad = found[-1]
    assert isinstance(bad, LineError)
    assert "lines 501 to 1,001" in bad.message


def test_rows_after_one_with_line_breaks_are_found_in_the_file() -> None:
    good, bad = csv_rows(b'id,text\n1,"a\nb\nc"\n2,\xe9\n')
    assert isinstance(good, BulkLine)
    assert isinstance(bad, LineError)
    assert (bad.line, "(line 5 of the file)" in bad.message) == (2, True)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_ends_of_lines_and_a_mark_at_the_beginning(ends: bytes, mark: bytes) -> None:
    found = csv_rows(mark + ends.join([b"", b"id,text", b"1,one", b"", b"2,two", b""]))
    assert [row.custom_id for row in found] == ["1", "2"]
    assert all(isinstance(row, BulkLine) for row in found)


def test_a_line_that_would_fill_the_memory_is_one_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_tables, "MAX_CELL", 50)
    limit = csv.field_size_limit()
    try:
        found = csv_rows(b'id,text\n1,one\n2,"' + b"a,b" * 1000 + b'"\n3,three\n')
    finally:
        csv.field_size_limit(limit)
    assert [(row.line, isinstance(row, BulkLine)) for row in found] == [(1, True), (2, False), (3, True)]


@pytest.mark.parametrize(
    ("header", "message"),
    [(b"id,text,caf\xe9\n", "header is not UTF-8"), (b'id,"te"xt\n', "header is not readable as CSV")],
)
def test_a_header_that_cannot_be_read_is_no_row(header: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        csv_rows(header + b"1,one\n")


def test_columns_without_a_name_get_one() -> None:
    (row,) = csv_rows(b",id,text,\n0,1,one,x\n")
    assert isinstance(row, BulkLine)
    assert row.extra == {"column_1": "0", "id": "1", "input_text": "one", "column_4": "x"}


def test_a_reader_given_up_in_the_middle_outlives_its_file_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    path = tmp_path / "in.csv"
    path.write_bytes(many(b"500,x"))
    file = path.open("rb")
    reading = table_rows("csv", file)
    assert next(reading).cells == {"id": "1", "text": "word1"}
    file.close()
    del reading
    gc.collect()
    assert complaints == []


# -------------------------------------------------------------------------------------------------------- Parquet

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NAN = float("nan")
VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.null(), None, None),
    (pa.bool_(), True, True),
    *((kind, 7, 7) for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32())),
    (pa.int64(), -(2**63), -(2**63)),
    (pa.uint64(), 2**64 - 1, 2**64 - 1),
    (pa.float16(), 0.5, 0.5),
    (pa.float32(), 0.5, 0.5),
    (pa.float64(), 0.5, 0.5),
    (pa.float64(), NAN, None),
    (pa.float32(), float("-inf"), None),
    (pa.float16(), NAN, None),
    (pa.string(), "naïve", "naïve"),
    (pa.large_string(), "x", "x"),
    (pa.string_view(), "x", "x"),
    (pa.binary(), b"\xff\x00", "/wA="),
    (pa.binary(2), b"\xff\x00", "/wA="),
    (pa.large_binary(), b"\xff\x00", "/wA="),
    (pa.binary_view(), b"\xff\x00", "/wA="),
    (pa.date32(), date(2026, 1, 2), "2026-01-02"),
    (pa.date64(), date(2026, 1, 2), "2026-01-02"),
    (pa.time32("s"), time(3, 4, 5), "03:04:05"),
    (pa.time64("us"), time(3, 4, 5, 6), "03:04:05.000006"),
    (pa.time64("ns"), 1, "00:00:00.000000001"),
    *(
        (pa.timestamp(unit), datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05")
        for unit in ("s", "ms", "us")
    ),
    (pa.timestamp("us", "UTC"), MOMENT, "2026-01-02T03:04:05+00:00"),
    (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
    (pa.duration("s"), timedelta(seconds=90), 90.0),
    (pa.duration("ns"), 1_500_000_001, 1.500000001),
    (pa.decimal128(10, 2), Decimal("12.30"), "12.30"),
    (pa.decimal256(50, 2), Decimal("12.30"), "12.30"),
    (pa.dictionary(pa.int8(), pa.string()), "x", "x"),
    (pa.uuid(), UUID(int=1).bytes, str(UUID(int=1))),
    (pa.list_(pa.date32()), [date(2026, 1, 2), None], ["2026-01-02", None]),
    (pa.large_list(pa.float64()), [NAN, 1.0], [None, 1.0]),
    (pa.list_(pa.int8(), 2), [1, 2], [1, 2]),
    (pa.list_(pa.timestamp("ns")), [1], ["1970-01-01T00:00:00.000000001"]),
    (pa.map_(pa.string(), pa.decimal128(3, 1)), [("a", Decimal("1.5"))], [["a", "1.5"]]),
    (
        pa.struct([("at", pa.timestamp("ns")), ("raw", pa.list_(pa.binary()))]),
        {"at": 1, "raw": [b"\xff"]},
        {"at": "1970-01-01T00:00:00.000000001", "raw": ["/w=="]},
    ),
]


def parquet(**columns: pa.Array) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    file.seek(0)
    return file


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES, ids=str)
def test_every_arrow_type_is_carried_through_as_json(kind: pa.DataType, value: Any, expected: Any) -> None:
    file = parquet(text=pa.array(["one", "two"]), extra=pa.array([value, None], type=kind))
    shape = Shape("parquet", template="{text}")
    check_shape(shape, file)
    first, second = read_rows(file, shape, OPTIONS)
    assert isinstance(first, BulkLine)
    assert isinstance(second, BulkLine)
    assert first.extra.get("extra") == expected
    json.dumps(first.extra, allow_nan=False)
    assert "extra" not in second.extra


def test_what_python_cannot_hold_is_its_row_s_matter_alone() -> None:
    beyond = pa.array([0, 10**13, 1], type=pa.int64()).cast(pa.timestamp("s"))
    rows = list(table_rows("parquet", parquet(text=pa.array(["a", "b", "c"]), at=beyond)))
    assert [row.fault is None for row in rows] == [True, False, True]
    assert rows[1].fault is not None
    assert "'at' holds what cannot be read" in rows[1].fault
    assert rows[1].cells == {"text": "b"}


def test_text_that_is_not_utf8_is_its_row_s_matter_alone() -> None:
    wrong = pa.array([b"fine", b"caf\xe9"]).view(pa.string())
    good, bad = read_rows(parquet(text=wrong), Shape("parquet", template="{text}"), OPTIONS)
    assert isinstance(good, BulkLine)
    assert isinstance(bad, LineError)
    assert "not UTF-8" in bad.message


@pytest.mark.parametrize(
    ("column", "prompt"),
    [
        (pa.array([b"plain"]), "plain"),  # text, as some writers have it
        (pa.array([MOMENT]), "2026-01-02T03:04:05+00:00"),
        (pa.array([[1, 2]]), "[1, 2]"),
        (pa.array([1.5]), "1.5"),
        (pa.array([b"\xff"]), None),
        (pa.array([None], type=pa.string()), None),
        (pa.array([NAN]), None),
    ],
)
def test_a_template_takes_text_of_any_value_and_never_of_none(column: pa.Array, prompt: str | None) -> None:
    (row,) = read_rows(
        parquet(body=column), Shape("parquet", template="{body}"), LineOptions(OPTIONS.defaults, chat=False)
    )
    if prompt is None:
        assert isinstance(row, LineError)
        assert row.message.startswith("body: ")
    else:
        assert isinstance(row, BulkLine)
        assert row.payload.prompt == prompt


def test_a_file_that_is_cut_off_is_refused() -> None:
    whole = parquet(text=pa.array([str(n) * 100 for n in range(5000)])).getvalue()
    with pytest.raises(RequestError, match="no readable Parquet file"):
        column_names("parquet", io.BytesIO(whole[:-20]))
    spoilt = io.BytesIO(whole[:40] + b"\xff" * 400 + whole[440:])
    with pytest.raises(RequestError, match="no readable Parquet file"):
        list(table_rows("parquet", spoilt))


def test_bad_rows_keep_their_ids_and_keys_when_read_again() -> None:
    shape = Shape("csv", template="{text}", id_column="id")
    file = io.BytesIO(b"id,text,answer\n1,,18\n2,two,19\n3,x,y,z\n")
    found = list(read_carried_rows(file, shape, OPTIONS))
    assert [(line.line, line.custom_id, line.extra.get("answer")) for line in found] == [
        (1, "1", "18"),
        (2, "2", "19"),
        (3, "3", "y"),
    ]
