"""The output of a batch: order, what a line holds, and files that appear whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import RequestError
from models_db.batch_rows import BatchRow
from models_db.jobs import StoredResult
from models_db.tables import JobState
from workers import bulk_export
from workers.bulk_export import (
    Exported,
    check_output,
    errors_path_for,
    export_batch,
    manifest_path_for,
)
from workers.bulk_input import read_carried

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)


def row(
    position: int, *, text: str | None = "fine", state: JobState | None = None, **fields: Any
) -> BatchRow:
    result = None if text is None else StoredResult(text, "stop", 3, 5, latency_s=0.1234567)
    given: dict[str, Any] = {
        "position": position,
        "custom_id": f"line-{position}",
        "job_id": f"job-{position}",
        "state": state or (JobState.FAILED if text is None else JobState.SUCCEEDED),
        "model": "smollm2",
        "error_type": None,
        "error_message": None,
        "result": result,
    }
    return BatchRow(**(given | fields))


def export(
    rows: list[BatchRow],
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: bytes | None = None,
    *,
    by_completion: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    monkeypatch.setattr(bulk_export, "iter_batch_rows", lambda connection, batch_id, **_: iter(rows))
    file = None if source is None else io.BytesIO(source)
    carried = None if file is None else read_carried(file)
    export_batch(None, "batch", output, carried=carried, by_completion=by_completion)  # type: ignore[arg-type]
    return lines(output), lines(errors_path_for(output))


def lines(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in path.read_text(encoding="utf-8").split("\n")
        if line
    ]


def test_results_and_errors_keep_the_order_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row(1),
        row(2, text=None, error_type="prompt_too_long", error_message="too long"),
        row(4),
        row(5, text=None, state=JobState.CANCELLED),
        row(6, text=None, state=JobState.RUNNING),
    ]
    results, failures = export(rows, tmp_path / "out.jsonl", monkeypatch)
    assert [line["custom_id"] for line in results] == ["line-1", "line-4"]
    assert [(line["line"], line["state"], line["error"]["code"]) for line in failures] == [
        (2, "failed", "prompt_too_long"),
        (5, "cancelled", "cancelled"),
        (6, "running", "not_finished"),
    ]


def test_a_line_leaves_out_what_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,), _ = export([row(1)], tmp_path / "out.jsonl", monkeypatch)
    assert line["latency_s"] == 0.123457
    assert not {"token_ids", "logprobs", "stop_reason", "seed"} & line.keys()


def test_other_keys_of_the_input_come_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        b'{"custom_id": "line-1", "prompt": "x", "answer": "18"}\n\n{"custom_id": "line-3", "answer": 2}\n'
    )
    results, failures = export([row(1), row(3, text=None)], tmp_path / "out.jsonl", monkeypatch, source)
    assert results[0]["answer"] == "18"
    assert failures[0]["answer"] == 2


def test_keys_of_another_file_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = b'{"custom_id": "someone else", "answer": "18"}\n'
    results, _ = export([row(1), row(2)], tmp_path / "out.jsonl", monkeypatch, source)
    assert [("answer" in line) for line in results] == [False, False]


@given(answers=st.lists(texts), extra=st.dictionaries(texts.map("a column called {}".format), texts))
def test_any_answer_survives_the_round_trip(
    answers: list[str], extra: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = tmp_path_factory.mktemp("out") / "out.jsonl"
    rows = [row(number, text=answer) for number, answer in enumerate(answers, 1)]
    source = "".join(json.dumps({"custom_id": line.custom_id} | extra) + "\n" for line in rows)
    with pytest.MonkeyPatch.context() as patch:
        results, _ = export(rows, output, patch, source.encode())
    assert [line["text"] for line in results] == answers
    assert all(line[name] == value for line in results for name, value in extra.items())


def test_a_failed_export_leaves_the_old_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")

    def broken(connection: object, batch_id: str, **_: object) -> Any:
        yield row(1)
        raise OSError("the database went away")

    monkeypatch.setattr(bulk_export, "iter_batch_rows", broken)
    with pytest.raises(OSError, match="went away"):
        export_batch(None, "batch", output)  # type: ignore[arg-type]
    assert output.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def night(rows: list[BatchRow], output: Path, patch: pytest.MonkeyPatch) -> None:
    """An export with its manifest."""

    def counted(exported: Exported) -> dict[str, int]:
        return {"results": exported.results, "errors": exported.errors}

    patch.setattr(bulk_export, "iter_batch_rows", lambda connection, batch_id, **_: iter(rows))
    export_batch(None, "batch", output, manifest=counted)  # type: ignore[arg-type]


def found(output: Path) -> dict[str, int]:
    return {"results": len(lines(output)), "errors": len(lines(errors_path_for(output)))}


YESTERDAY = [row(1), row(2), row(3)]
TONIGHT = [row(1), row(2, text=None)]


@pytest.mark.parametrize("replaced", range(4))
def test_where_a_manifest_is_it_counts_the_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    """The second export to the same name is cut off after so many of its files are in place."""
    output, calls = tmp_path / "out.jsonl", [0]

    def replace(draft: Path, path: Path) -> None:
        if calls[0] == replaced:
            raise KeyboardInterrupt
        calls[0] += 1
        draft.rename(path)

    night(YESTERDAY, output, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("workers.atomic_files.os.replace", replace)
        if replaced < 3:
            with pytest.raises(KeyboardInterrupt):
                night(TONIGHT, output, patch)
        else:
            night(TONIGHT, output, patch)
    old, new = {"results": 3, "errors": 0}, {"results": 1, "errors": 1}
    assert found(output) == [old, old | {"errors": 1}, new, new][replaced]
    assert manifest_path_for(output).exists() == (replaced == 3)
    night(TONIGHT, output, monkeypatch)
    assert json.loads(manifest_path_for(output).read_text()) == found(output) == new
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.parametrize("written", range(3))
def test_a_disk_that_is_full_leaves_all_old_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    output, calls = tmp_path / "out.jsonl", [0]

    def fsync(_: int) -> None:
        if calls[0] == written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls[0] += 1

    night(YESTERDAY, output, monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("workers.atomic_files.os.fsync", fsync)
        with pytest.raises(OSError, match="No space") as full:
            night(TONIGHT, output, patch)
    paths = (errors_path_for(output), output, manifest_path_for(output))
    assert full.value.filename == str(paths[written])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl", "out.manifest.json"])
def test_no_file_takes_the_place_of_what_is_no_plain_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RequestError, match=r"^--output: .*out\.jsonl (is a folder|would replace)"):
        check_output(tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["n" * 235 + ".jsonl", "n" * 245 + ".jsonl", "n" * 260, "é" * 125])
def test_a_name_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=r"^--output: .* cannot be written \(File name too long\)"):
        check_output(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


def test_carried_keys_are_not_lost_to_the_fields_of_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"state": "Ohio", "input_state": "Utah", "line": 7, "error": None, "note": "x"}
    source = "".join(json.dumps({"custom_id": f"line-{n}"} | own) + "\n" for n in (1, 2)).encode()
    (answer,), (failure,) = export([row(1), row(2, text=None)], tmp_path / "out.jsonl", monkeypatch, source)
    assert own.items() <= answer.items()
    assert (failure["line"], failure["state"], failure["error"]["code"]) == (2, "failed", "failed")
    assert {
        "input_input_state": "Ohio",
        "input_state": "Utah",
        "input_line": 7,
        "input_error": None,
        "note": "x",
    }.items() <= failure.items()


def test_lines_gone_bad_since_validation_carry_nothing() -> None:
    file = io.BytesIO(b'{"custom_id": "a", "x": 1}\n\xff\n[1]\n{"custom_id": "b", "y": 2}\n')
    assert [(line.line, line.custom_id, line.extra) for line in read_carried(file)] == [
        (1, "a", {"x": 1}),
        (4, "b", {"y": 2}),
    ]


def test_half_a_character_in_a_bad_line_does_not_cost_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = b'{"custom_id": "line-1", "note": "\\ud800"}\n'
    _, failures = export([row(1, text=None)], tmp_path / "out.jsonl", monkeypatch, source)
    assert failures[0]["note"] == "\ud800"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_is_not_a_number_leaves_the_files_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    source = f'{{"custom_id": "line-1", "score": {number}, "all": [0.5, {{"least": {number}}}]}}\n'.encode()
    for state in (JobState.FAILED, JobState.SUCCEEDED):
        both = export([row(1, state=state)], tmp_path / "out.jsonl", monkeypatch, source)
        (line,) = [line for some in both for line in some]
        assert (line["score"], line["all"]) == (None, [0.5, {"least": None}])


@pytest.mark.parametrize("by_completion", [False, True])
@pytest.mark.parametrize("custom_id", ["[]", '{"a": 1}', "7", "1" * 30, "true", "null", r'"\ud800"'])
def test_an_id_that_is_no_text_does_not_cost_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, custom_id: str, by_completion: bool
) -> None:
    source = f'{{"custom_id": {custom_id}, "n": 1}}\n{{"custom_id": "line-2", "n": 2}}\n'.encode()
    rows = [row(2), row(1, text=None, custom_id=None)]
    answers, failures = export(
        rows if by_completion else rows[::-1],
        tmp_path / "out.jsonl",
        monkeypatch,
        source,
        by_completion=by_completion,
    )
    assert [line["n"] for line in answers] == [2]
    assert [(line["custom_id"], line.get("n")) for line in failures] == [
        (None, None if "ud800" in custom_id else 1)
    ]


def test_what_a_deadline_or_a_cancel_left_of_an_answer_is_in_the_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(reason: str) -> StoredResult:
        return StoredResult("half an", reason, 3, 5)

    rows = [
        row(1, result=part("deadline")),
        row(2, result=part("cancelled"), state=JobState.CANCELLED),
        row(3, result=part("length")),
    ]
    results, failures = export(rows, tmp_path / "out.jsonl", monkeypatch)
    assert [line["custom_id"] for line in results] == ["line-3"]
    assert [(line["state"], line["error"]["code"], line["text"]) for line in failures] == [
        ("expired", "deadline", "half an"),
        ("cancelled", "cancelled", "half an"),
    ]


def test_answers_taken_over_are_counted_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_export, "iter_batch_rows", lambda *_, **__: iter([row(1), row(2, attempt=0)]))
    exported = export_batch(None, "batch", tmp_path / "out.jsonl")  # type: ignore[arg-type]
    assert (exported.results, exported.reused, exported.reused_tokens) == (2, 1, 5)
    assert (exported.prompt_tokens, exported.completion_tokens) == (3, 5)
