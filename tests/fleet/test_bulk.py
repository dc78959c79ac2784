"""Whole files through a real fleet (echo): their shapes, order, failures, bounded flight, what is told of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from backend.api import ConfigurationError
from models_db.session import reading
from models_db.tables import BatchState, Job, JobState
from tests.fleet.bulk_world import IDLE, batch_id_of, bulk, lines, rows, run_batch, write
from tests.fleet.conftest import MakeFleet
from tests.fleet.echo_fleet import echo_fleet
from workers.bulk import BulkRunner
from workers.bulk_export import errors_path_for
from workers.bulk_input import LineOptions
from workers.bulk_source import BulkSource, validate_source
from workers.cli import app
from workers.cli.bulk_work import export_files
from workers.cli.common import ExitCode
from workers.client import Client
from workers.demo import Demo


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with echo_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def client(fleet: Demo) -> Iterator[Client]:
    settings = fleet.settings.model_copy(update={"models": (IDLE,)})
    with Client(settings) as made:
        yield made


def test_a_file_comes_back_in_its_order_with_its_own_keys(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row | {"answer": n} for n, row in enumerate(rows(300))])
    output = tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output, "--in-flight", "50")
    assert done.exit_code == 0, done.output
    assert "Carried through to the output unchanged: answer." in done.stderr
    assert "300/300 done" in done.stderr
    assert [(line["custom_id"], line["text"], line["answer"]) for line in lines(output)] == [
        (f"line-{n}", f"word{n}", n) for n in range(300)
    ]
    assert lines(errors_path_for(output)) == []

    again = tmp_path / "again.jsonl"
    assert bulk(fleet, "export", batch_id_of(done), "-o", again).exit_code == 0
    assert again.read_bytes() == output.read_bytes()
    shown = json.loads(bulk(fleet, "status", batch_id_of(done), "--json").stdout)
    assert (shown["state"], shown["counts"]["succeeded"]) == ("completed", 300)


def test_failed_lines_are_reported_and_spoil_no_other(fleet: Demo, tmp_path: Path) -> None:
    mixed = rows(10)
    mixed[4]["prompt"] = "   "
    mixed[7]["token_ids"] = [10**9]
    del mixed[7]["prompt"]
    source, output = write(tmp_path / "in.jsonl", mixed), tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output, "--no-chat")
    assert done.exit_code == ExitCode.FAILED
    assert len(lines(output)) == 8
    failures = lines(errors_path_for(output))
    assert [(line["custom_id"], line["line"], line["state"]) for line in failures] == [
        ("line-4", 5, "failed"),
        ("line-7", 8, "failed"),
    ]
    assert "holds no word to echo" in failures[0]["error"]["message"]
    assert "8 answers" in done.stderr
    assert "2 failures" in done.stderr


def test_options_fill_what_lines_leave_out(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"custom_id": str(n), "prompt": "a b c"} for n in range(5)])
    output = tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output, "--limit", "2", "--max-tokens", "2", "-p", "stop=zzz")
    assert done.exit_code == 0
    assert [line["text"] for line in lines(output)] == ["a b", "a b"]


def test_standard_input_is_an_input_too(fleet: Demo, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    urls = ["--database-url", fleet.settings.database_url, "--broker-url", fleet.settings.broker_url]
    text = "".join(json.dumps(row | {"answer": 1}) + "\n" for row in rows(3))
    done = CliRunner().invoke(app, ["bulk", "run", "-", "-o", str(output), *urls], input=text)
    assert done.exit_code == 0, done.output
    assert [(line["text"], line["answer"]) for line in lines(output)] == [(f"word{n}", 1) for n in range(3)]


def test_a_file_runs_on_each_database(make_fleet: MakeFleet, any_database_url: str, tmp_path: Path) -> None:
    fleet = make_fleet(any_database_url)
    fleet.worker()
    words = ["Grüße", "日本語", "emoji 🙂", "back\\slash 'quote' \"double\"", "per%cent"]
    source = write(
        tmp_path / "in.jsonl",
        [{"custom_id": f"{n} {word}", "prompt": word, "max_tokens": 3} for n, word in enumerate(words * 20)],
    )
    output = tmp_path / "out.jsonl"
    urls = ["--broker-url", fleet.settings.broker_url, "--database-url", any_database_url]
    model = {"TOKENMILL_MODEL": fleet.settings.model}
    arguments = ["bulk", "run", str(source), "-o", str(output), "--in-flight", "30", *urls]
    done = CliRunner().invoke(app, arguments, env=model)
    assert done.exit_code == 0, done.output
    found = lines(output)
    assert [line["custom_id"] for line in found] == [f"{n} {word}" for n, word in enumerate(words * 20)]
    assert all(line["text"].startswith(line["custom_id"].split()[1]) for line in found)
    rows_by_model = CliRunner().invoke(app, ["stats", "--by", "model", "--json", *urls[2:]], env=model)
    (row,) = json.loads(rows_by_model.stdout)
    assert (row["key"], row["jobs"], row["succeeded"]) == (fleet.settings.model, 100, 100)


def test_no_more_than_asked_for_is_in_flight(client: Client, tmp_path: Path) -> None:
    seen: list[int] = []
    source = write(tmp_path / "in.jsonl", rows(200))
    ended = run_batch(
        client, source, lambda now: seen.append(now.inserted - now.done), in_flight=16, sleep=lambda s: None
    )
    assert ended.state is BatchState.COMPLETED
    assert max(seen) <= 16
    assert max(seen) > 0


def test_in_flight_must_be_positive(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        BulkRunner(client, in_flight=0)


def test_a_bad_line_is_one_line_of_errors_unless_told_otherwise(fleet: Demo, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    good = [json.dumps(row) for row in rows(3)]
    twice = json.dumps(rows(1)[0] | {"prompt": "again"})
    source.write_text("\n".join([good[0], "{oops", good[1], twice, good[2]]) + "\n")
    output = tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output)
    assert done.exit_code == ExitCode.FAILED
    assert [line["custom_id"] for line in lines(output)] == ["line-0", "line-1", "line-2"]
    bad = lines(errors_path_for(output))
    assert [(line["line"], line["error"]["code"]) for line in bad] == [
        (2, "malformed_json"),
        (4, "duplicate_custom_id"),
    ]
    assert "was used in line 1" in bad[1]["error"]["message"]
    refused = bulk(fleet, "run", source, "-o", output, "--refuse-bad")
    assert refused.exit_code == ExitCode.USAGE
    assert "2 bad lines, nothing was started" in refused.output


def test_the_manifest_says_what_was_run(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*rows(2), {"custom_id": "bad", "prompt": "x", "max_tokens": 0}])
    done = bulk(fleet, "run", source, "-o", tmp_path / "out.jsonl")
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["batch"] == batch_id_of(done)
    assert (manifest["lines"], manifest["results"], manifest["errors"]) == (3, 2, 1)
    assert (manifest["counts"]["succeeded"], manifest["counts"]["failed"]) == (2, 1)
    answers = lines(tmp_path / "out.jsonl")
    assert manifest["completion_tokens"] == sum(line["completion_tokens"] for line in answers)
    assert manifest["input"]["path"] == str(source)


def test_a_table_becomes_prompts(fleet: Demo, tmp_path: Path) -> None:
    source = tmp_path / "reviews.csv"
    source.write_text("id,text\nr1,good\nr2,bad\n")
    output = tmp_path / "out.jsonl"
    arguments = ("--template", "say {text}", "--id-column", "id", "--no-chat", "-p", "max_tokens=9")
    done = bulk(fleet, "run", source, "-o", output, *arguments)
    assert done.exit_code == 0, done.output
    answers = lines(output)
    assert [(line["custom_id"], line["input_text"]) for line in answers] == [("r1", "good"), ("r2", "bad")]
    assert answers[0]["text"].startswith("say good")


def test_openai_lines_are_answered_in_their_own_form(fleet: Demo, tmp_path: Path) -> None:
    def line(custom_id: str, **body: Any) -> dict[str, Any]:
        whole = {"model": fleet.settings.model, "messages": [{"role": "user", "content": "one two"}]} | body
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}

    source = write(tmp_path / "in.jsonl", [line("a", max_tokens=1), line("b", tools=[{}])])
    output = tmp_path / "out.jsonl"
    assert bulk(fleet, "run", source, "-o", output).exit_code == ExitCode.FAILED
    (answer,) = lines(output)
    assert (answer["custom_id"], answer["error"], answer["response"]["status_code"]) == ("a", None, 200)
    body = answer["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 1
    (refused,) = lines(errors_path_for(output))
    assert (refused["custom_id"], refused["response"]) == ("b", None)
    assert "tools" in refused["error"]["message"]


def test_what_misses_the_deadline_expires(client: Client, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(5, model=IDLE))
    made, _ = validate_source(str(source), source.open("rb"), LineOptions(defaults={"model": "echo"}))
    with source.open("rb") as file:
        runner = BulkRunner(client)
        batch_id = runner.create("late", made, deadline_s=1e-6)
        runner.feed(batch_id, made, file)
        progress = runner.watch(batch_id)
    assert progress.state is BatchState.EXPIRED
    assert progress.counts[JobState.EXPIRED] == 5


def test_answers_come_in_the_order_of_completion_when_asked_for(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row | {"mark": n} for n, row in enumerate(rows(40))])
    output = tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output, "--order", "completion")
    assert done.exit_code == 0, done.output
    answers = lines(output)
    assert sorted(line["mark"] for line in answers) == list(range(40))
    assert all(line["custom_id"] == f"line-{line['mark']}" for line in answers)
    with Client(fleet.settings) as client:
        ended = [client.status(line["job_id"]).finished_at for line in answers]
    assert ended == sorted(moment for moment in ended if moment is not None)


def test_unchanged_lines_of_another_night_are_not_run_again(fleet: Demo, tmp_path: Path) -> None:
    tonight = rows(6)
    source = write(tmp_path / "in.jsonl", tonight)
    arguments = ("--reuse-days", "30")
    first = bulk(fleet, "run", source, "-o", tmp_path / "one.jsonl", *arguments)
    assert first.exit_code == 0, first.output
    tonight[2]["prompt"] = "changed"
    tonight[3]["temperature"] = 0.5  # drawn anew each night
    for row in tonight:
        row["custom_id"] += "-again"
    write(source, tonight)
    second = bulk(fleet, "run", source, "-o", tmp_path / "two.jsonl", *arguments)
    assert second.exit_code == 0, second.output
    old, new = lines(tmp_path / "one.jsonl"), lines(tmp_path / "two.jsonl")
    with Client(fleet.settings) as client:
        runs = [len(client.attempts(line["job_id"])) for line in new]
    assert runs == [0, 0, 1, 1, 0, 0]
    assert [line["text"] for line in new[:2]] == [line["text"] for line in old[:2]]
    assert new[2]["text"] == "changed"
    assert {line["job_id"] for line in old}.isdisjoint(line["job_id"] for line in new)
    assert "Taken over from earlier runs: 4 answers" in second.stderr
    manifest = json.loads((tmp_path / "two.manifest.json").read_text())
    assert (manifest["reused"], manifest["reused_tokens"], manifest["completion_tokens"]) == (4, 4, 2)


def test_a_file_is_run_for_a_tenant_which_status_shows(fleet: Demo, tmp_path: Path) -> None:
    mixed = rows(3)
    mixed[1]["tenant"] = "its own"
    source, output = write(tmp_path / "in.jsonl", mixed), tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output, "--tenant", "acme")
    assert done.exit_code == 0, done.output
    batch_id = batch_id_of(done)
    with Client(fleet.settings) as client, reading(client.engine()) as conn:
        tenants = conn.scalars(
            select(Job.tenant).where(Job.batch_id == batch_id).order_by(Job.position)
        ).all()
    assert tenants == ["acme", "its own", "acme"]
    assert json.loads(bulk(fleet, "status", batch_id, "--json").stdout)["tenant"] == "acme"
    assert "acme" in bulk(fleet, "status").stdout


def test_lines_whose_own_keys_are_gone_are_counted_aloud(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row | {"answer": n} for n, row in enumerate(rows(3))])
    output, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    done = bulk(fleet, "run", source, "-o", output)
    assert "without the keys" not in done.stderr
    batch_id = batch_id_of(done)
    with Client(fleet.settings) as client:
        progress = BulkRunner(client).progress(batch_id)
        with source.open("rb") as file:
            made = BulkSource.from_json(progress.source)
            write(source, rows(1))  # under the hand of the export
            exported = export_files(client.engine(), progress, made, file, again)
    assert (exported.results, exported.without_extra) == (3, 2)
    manifest = json.loads((tmp_path / "again.manifest.json").read_text())
    assert manifest["without_extra"] == 2


@pytest.mark.parametrize(
    ("name", "content", "failures"),
    [
        ("bad.jsonl", b"{oops\n[1]\n", 2),
        ("bad.csv", b"prompt\ncaf\xe9\n", 1),
        ("empty.jsonl", b"\n", 0),
        ("empty.csv", b"", 0),
        ("header.csv", b"id,prompt\n", 0),
    ],
)
def test_a_file_of_which_nothing_can_run_ends_like_any_other(
    fleet: Demo, tmp_path: Path, name: str, content: bytes, failures: int
) -> None:
    source, output = tmp_path / name, tmp_path / "out.jsonl"
    source.write_bytes(content)
    done = bulk(fleet, "run", source, "-o", output)
    assert done.exit_code == (ExitCode.FAILED if failures else ExitCode.OK), done.output
    assert (len(lines(output)), len(lines(errors_path_for(output)))) == (0, failures)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert (manifest["state"], manifest["lines"], manifest["errors"]) == ("completed", failures, failures)
    if not failures:
        assert "there is nothing to run" in done.stderr


def test_a_packed_file_is_read_and_resumed_like_a_plain_one(fleet: Demo, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    plain = write(tmp_path / "in.jsonl", [row | {"answer": n} for n, row in enumerate(rows(30))])
    source.write_bytes(gzip.compress(plain.read_bytes()))
    done = bulk(fleet, "run", source, "-o", output)
    assert done.exit_code == 0, done.output
    assert [line["answer"] for line in lines(output)] == list(range(30))
    again = tmp_path / "again.jsonl"
    assert bulk(fleet, "export", batch_id_of(done), "-o", again).exit_code == 0
    assert again.read_bytes() == output.read_bytes()


def test_bad_rows_keep_their_keys_and_nobody_calls_them_lost(fleet: Demo, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_bytes(b"id,prompt,max_tokens,answer\na,one,1,18\nb,two,many,19\nc,caf\xe9,1,20\n")
    done = bulk(fleet, "run", source, "-o", output, "--id-column", "id")
    assert done.exit_code == ExitCode.FAILED
    assert "without the keys" not in done.stderr
    bad = lines(errors_path_for(output))
    assert [(line["custom_id"], line["line"], line["answer"]) for line in bad] == [
        ("b", 2, "19"),
        ("c", 3, "20"),
    ]


def test_answers_that_the_deadline_cuts_off_are_errors_and_run_again_when_asked(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    row = {"custom_id": "slow", "prompt": "a b c " * 200, "max_tokens": 600, "ignore_eos": True}
    source, output = write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl"
    slow = make_fleet(engine={"echo_tokens_per_s": 20})
    worker = slow.worker()
    for deadline in ("1s", "5s", "25s"):  # a machine that is held up may not begin within the first
        done = bulk(slow, "run", source, "-o", output, "--deadline", deadline)
        assert done.exit_code == ExitCode.FAILED, done.output
        if "Cut off by a deadline" in done.stderr:
            break
    assert "Cut off by a deadline: 1 answer, which is in the errors file" in done.stderr
    assert lines(output) == []
    (cut,) = lines(errors_path_for(output))
    assert (cut["state"], cut["error"]["code"], cut["finish_reason"]) == (
        "expired",
        "deadline",
        "deadline",
    )
    assert cut["text"].startswith("a")
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert (manifest["cut_off"], manifest["finish_reasons"]) == (1, {"deadline": 1})
    batch_id = batch_id_of(done)
    assert "0 jobs" in bulk(slow, "retry-failed", batch_id).stderr
    assert worker.stop() == 0
    slow.worker(engine={})
    again = bulk(slow, "retry-failed", batch_id, "-o", output, "--also", "expired")
    assert again.exit_code == 0, again.output
    assert [line["completion_tokens"] for line in lines(output)] == [600]
