"""Whole files through a real fleet (echo): order, failures, bounded flight, interruption, resumption, cancel."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import select
from typer.testing import CliRunner, Result

from backend.api import ConfigurationError
from models_db.batches import BatchProgress, request_cancel_batch, unpublished
from models_db.session import reading, transaction
from models_db.tables import BatchState, Job, JobState
from tests.fleet.conftest import MakeFleet
from tests.fleet.echo_fleet import echo_fleet
from tests.fleet.fleet import Fleet
from workers.broker import Broker, BrokerUnavailableError
from workers.bulk import BulkRunner
from workers.bulk_export import errors_path_for
from workers.bulk_input import LineOptions
from workers.bulk_source import BulkSource, validate_source
from workers.cli import app
from workers.cli.bulk_work import export_files
from workers.cli.common import ExitCode
from workers.client import Client
from workers.demo import Demo
from workers.payload import BULK_PRIORITY, queue_for, queue_key

IDLE = "nobody-serves-this"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with echo_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def client(fleet: Demo) -> Iterator[Client]:
    settings = fleet.settings.model_copy(update={"models": (IDLE,)})
    with Client(settings) as made:
        yield made


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"line-{n}", "prompt": f"word{n}", "max_tokens": 1} | fields for n in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bulk(fleet: Demo | Fleet, *arguments: str | Path) -> Result:
    urls = ["--database-url", fleet.settings.database_url]
    if arguments[0] in ("run", "resume", "retry-failed"):
        urls += ["--broker-url", fleet.settings.broker_url]
    model = {"TOKENMILL_MODEL": fleet.settings.model}
    return CliRunner().invoke(app, ["bulk", *map(str, arguments), *urls], env=model)


def batch_id_of(done: Result) -> str:
    return done.stderr.split("Batch ", 1)[1].split(":", 1)[0]


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


def run_batch(
    client: Client,
    source: Path,
    report: Callable[[BatchProgress], None] = lambda progress: None,
    *,
    model: str = "smollm2",
    in_flight: int = 1000,
    broker: Broker | None = None,
    sleep: Callable[[float], None] | None = None,
) -> BatchProgress:
    options = LineOptions(defaults={"model": model})
    with source.open("rb") as file:
        made, _ = validate_source(str(source), file, options)
        extra: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
        runner = BulkRunner(client, in_flight=in_flight, report=report, broker=broker, **extra)
        return runner.run(runner.create("test", made), made, file)


def test_no_more_than_asked_for_is_in_flight(client: Client, tmp_path: Path) -> None:
    seen: list[int] = []
    source = write(tmp_path / "in.jsonl", rows(200))
    ended = run_batch(
        client, source, lambda now: seen.append(now.inserted - now.done), in_flight=16, sleep=lambda s: None
    )
    assert ended.state is BatchState.COMPLETED
    assert max(seen) <= 16
    assert max(seen) > 0


def test_an_interrupted_run_is_resumed_where_it_stood(fleet: Demo, client: Client, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row | {"answer": n} for n, row in enumerate(rows(120))])
    stopped: list[BatchProgress] = []

    def interrupt(now: BatchProgress) -> None:
        if now.inserted >= 40:
            stopped.append(now)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(client, source, interrupt, in_flight=20)
    batch_id = stopped[0].id
    assert stopped[0].state is BatchState.VALIDATING
    assert stopped[0].inserted < 120

    output = tmp_path / "out.jsonl"
    done = bulk(fleet, "resume", batch_id, "-o", output)
    assert done.exit_code == 0, done.output
    whole = tmp_path / "whole.jsonl"
    assert bulk(fleet, "run", source, "-o", whole).exit_code == 0

    def answers(path: Path) -> list[tuple[Any, ...]]:
        return [(line["custom_id"], line["text"], line["answer"]) for line in lines(path)]

    assert answers(output) == answers(whole)
    twice = tmp_path / "twice.jsonl"
    assert bulk(fleet, "resume", batch_id, "-o", twice).exit_code == 0  # a finished batch is only exported
    assert twice.read_bytes() == output.read_bytes()


def test_a_changed_file_is_not_mixed_into_a_resumed_batch(
    fleet: Demo, client: Client, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", rows(60))
    stopped: list[str] = []

    def interrupt(now: BatchProgress) -> None:
        if now.inserted:
            stopped.append(now.id)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(client, source, interrupt, in_flight=10)
    write(source, rows(61))
    done = bulk(fleet, "resume", stopped[0], "-o", tmp_path / "out.jsonl")
    assert done.exit_code == ExitCode.USAGE
    assert "has changed since the batch was made" in done.stderr
    assert f"tokenmill bulk cancel {stopped[0]}" in done.stderr
    source.unlink()
    done = bulk(fleet, "resume", stopped[0], "--no-wait")
    assert done.exit_code == ExitCode.USAGE
    assert "No such file" in done.stderr


def test_a_batch_cancelled_while_it_is_fed_ends_with_nothing_left(client: Client, tmp_path: Path) -> None:
    cancelled: list[str] = []

    def cancel(now: BatchProgress) -> None:
        if now.inserted and not cancelled:
            cancelled.append(now.id)
            transaction(client.engine(), lambda conn: request_cancel_batch(conn, now.id))

    source = write(tmp_path / "in.jsonl", rows(100))
    ended = run_batch(client, source, cancel, model=IDLE, in_flight=10)
    assert ended.state is BatchState.CANCELLED
    assert ended.counts[JobState.CANCELLED] == ended.inserted == ended.done
    assert ended.inserted < 100


def test_jobs_that_redis_refused_are_published_when_it_is_back(
    fleet: Demo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Flaky(Broker):
        """Refuses twice: the client's publication and the first repetition."""

        def __init__(self, url: str) -> None:
            super().__init__(url)
            self.refusals = 2

        def push(self, deliveries: Iterable[tuple[str, bytes]]) -> None:
            if self.refusals:
                self.refusals -= 1
                raise BrokerUnavailableError("redis://away", ConnectionError("refused"))
            super().push(deliveries)

    broker = Flaky(fleet.settings.broker_url)
    moments = iter(range(0, 10_000_000, 6))  # the next repetition is always due
    with Client(fleet.settings, broker=broker) as client:
        source = write(tmp_path / "in.jsonl", rows(5))
        with source.open("rb") as file:
            made, _ = validate_source(str(source), file, LineOptions(defaults={"model": "smollm2"}))
            runner = BulkRunner(
                client, broker=broker, clock=lambda: float(next(moments)), sleep=lambda s: None
            )
            ended = runner.run(runner.create("flaky", made), made, file)
    assert ended.counts[JobState.SUCCEEDED] == 5
    assert "still wait to be published" in caplog.text


KILLED = """
import os, signal, sys
from workers.broker import Broker
from workers.bulk import BulkRunner
from workers.bulk_source import validate_source
from workers.bulk_input import LineOptions
from workers.client import Client
from workers.settings import load_settings

class Deadly(Broker):
    pushes = 0

    def push(self, deliveries):
        self.pushes += 1
        if self.pushes == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().push(deliveries)

settings = load_settings()
with Client(settings, broker=Deadly(settings.broker_url)) as client, open(sys.argv[1], "rb") as file:
    made, _ = validate_source(sys.argv[1], file, LineOptions(defaults={"model": "nobody-serves-this"}))
    runner = BulkRunner(client)
    batch_id = runner.create("killed", made)
    print(batch_id, flush=True)
    runner.feed(batch_id, made, file, bounded=False)
"""


def test_a_feeder_killed_between_storing_and_publishing_leaves_nothing_that_resume_does_not_publish(
    fleet: Demo, client: Client, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", rows(2600))
    environment = os.environ | {
        "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
        "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
        "TOKENMILL_MODELS": IDLE,
    }
    command = [sys.executable, "-c", KILLED, str(source)]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    batch_id = killed.stdout.strip()
    with reading(client.engine()) as conn:
        stored = list(conn.scalars(select(Job.id).where(Job.batch_id == batch_id)))
        assert unpublished(conn, batch_id, 5000) == []  # all of them claim to be
    queue = queue_key(queue_for(IDLE), BULK_PRIORITY)
    with redis.Redis.from_url(fleet.settings.broker_url) as broker:

        def waiting() -> list[str]:
            found = [json.loads(raw)["headers"]["id"] for raw in broker.lrange(queue, 0, -1)]
            return [job_id for job_id in found if job_id in mine]

        mine = set(stored)
        assert (len(stored), len(waiting())) == (1500, 1000)
        made = BulkSource.from_json(BulkRunner(client).progress(batch_id).source)
        with made.reopen() as file:
            BulkRunner(client).feed(batch_id, made, file, bounded=False)
        with reading(client.engine()) as conn:
            mine = set(conn.scalars(select(Job.id).where(Job.batch_id == batch_id)))
            assert unpublished(conn, batch_id, 5000) == []
        assert len(mine) == 2600
        assert sorted(waiting()) == sorted(mine)  # each once: what was published already was not again


def test_in_flight_must_be_positive(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        BulkRunner(client, in_flight=0)


def test_ctrl_c_leaves_a_batch_that_can_be_cancelled_and_says_how(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(30, model=IDLE))
    environment = os.environ | {
        "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
        "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
        "TOKENMILL_MODELS": IDLE,
    }
    command = [
        sys.executable,
        "-m",
        "workers.cli",
        "bulk",
        "run",
        str(source),
        "-o",
        str(tmp_path / "out.jsonl"),
    ]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = process.stderr.readline()
    batch_id = seen.split("Batch ", 1)[1].split(":", 1)[0]
    while json.loads(bulk(fleet, "status", batch_id, "--json").stdout)["counts"]["queued"] < 30:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert f"tokenmill bulk cancel {batch_id}" in rest
    assert f"tokenmill bulk resume {batch_id}" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "out.jsonl").exists()
    cancelled = bulk(fleet, "cancel", batch_id)
    assert "30 jobs cancelled" in cancelled.stdout
    shown = json.loads(bulk(fleet, "status", batch_id, "--json").stdout)
    assert shown["state"] == "cancelled"
    assert shown["source"]["path"] == str(source)
    again = bulk(fleet, "cancel", batch_id)
    assert again.stdout == "Nothing to cancel: the batch has ended, as cancelled\n"


# --------------------------------------------------------------------------------- other inputs, other endings


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


def test_no_wait_submits_everything_and_resume_collects_it(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(450))
    done = bulk(fleet, "run", source, "--no-wait", "--in-flight", "10")
    assert done.exit_code == 0, done.output
    batch_id = done.stdout.strip()
    output = tmp_path / "out.jsonl"
    assert bulk(fleet, "resume", batch_id, "-o", output).exit_code == 0
    assert [line["custom_id"] for line in lines(output)] == [f"line-{n}" for n in range(450)]
    assert bulk(fleet, "run", source).exit_code == ExitCode.USAGE


def test_failed_jobs_are_run_again_and_bad_lines_are_not(fleet: Demo, client: Client, tmp_path: Path) -> None:
    unwanted = {"custom_id": "empty", "prompt": "  ", "max_tokens": 1}  # echo refuses it: no word
    source = write(
        tmp_path / "in.jsonl", [*rows(2), unwanted, {"custom_id": "bad", "prompt": "x", "seed": -1}]
    )
    first = bulk(fleet, "run", source, "-o", tmp_path / "out.jsonl")
    assert first.exit_code == ExitCode.FAILED
    before = {line["custom_id"]: line["job_id"] for line in lines(tmp_path / "out.errors.jsonl")}
    again = bulk(fleet, "retry-failed", batch_id_of(first), "-o", tmp_path / "again.jsonl")
    assert again.exit_code == ExitCode.FAILED
    assert "1 jobs of batch" in again.stderr
    assert lines(tmp_path / "again.jsonl") == lines(tmp_path / "out.jsonl")
    after = {line["custom_id"]: line["job_id"] for line in lines(tmp_path / "again.errors.jsonl")}
    assert after == before
    assert [record.number for record in client.attempts(before["empty"])] == [1, 2]
    assert client.attempts(before["bad"]) == []


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


def test_a_run_killed_at_any_moment_is_resumed_to_the_same_file(fleet: Demo, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows(700))
    undisturbed = tmp_path / "whole.jsonl"
    assert bulk(fleet, "run", source, "-o", undisturbed).exit_code == 0
    command = [
        sys.executable,
        "-m",
        "workers.cli",
        "bulk",
        "run",
        str(source),
        "-o",
        str(tmp_path / "out.jsonl"),
    ]
    environment = os.environ | {
        "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
        "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
        "TOKENMILL_MODEL": fleet.settings.model,
    }
    process = subprocess.Popen(
        [*command, "--in-flight", "50"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Batch "):
            batch_id = line.split()[1].rstrip(":")
            break
    process.kill()
    process.wait(30)
    process.stderr.close()
    assert not (tmp_path / "out.jsonl").exists()
    assert bulk(fleet, "resume", batch_id, "-o", tmp_path / "out.jsonl").exit_code == 0
    timed = {"job_id", "seed", "queue_time_s", "time_to_first_token_s", "latency_s", "cached_tokens"}

    def stable(path: Path) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if name not in timed} for line in lines(path)]

    assert stable(tmp_path / "out.jsonl") == stable(undisturbed)


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


def test_once_all_lines_are_in_a_changed_file_costs_only_its_own_keys(fleet: Demo, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [rows(1)[0] | {"answer": 1}]), tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output)
    write(source, rows(2))
    again = bulk(fleet, "resume", batch_id_of(done), "-o", output)
    assert again.exit_code == 0, again.output
    assert "has changed since the batch was made: keys of the input are not carried through" in again.stderr
    assert "answer" not in lines(output)[0]


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


def test_ctrl_c_while_a_table_is_fed_from_standard_input_says_what_is_lost(
    fleet: Demo, tmp_path: Path
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt\n" + "word\n" * 500)
    environment = os.environ | {
        "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
        "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
        "TOKENMILL_MODELS": IDLE,
    }
    options = ["-o", str(tmp_path / "out.jsonl"), "--format", "csv", "--in-flight", "10", "--model", IDLE]
    command = [sys.executable, "-m", "workers.cli", "bulk", "run", "-", *options]
    with source.open("rb") as file:
        process = subprocess.Popen(command, env=environment, stdin=file, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    batch_id = process.stderr.readline().split("Batch ", 1)[1].split(":", 1)[0]
    while json.loads(bulk(fleet, "status", batch_id, "--json").stdout)["counts"]["queued"] < 10:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Exception ignored" not in rest
    assert "Standard input cannot be read again" in rest
    refused = bulk(fleet, "resume", batch_id, "-o", tmp_path / "out.jsonl")
    assert refused.exit_code == ExitCode.USAGE
    assert f"tokenmill bulk cancel {batch_id}" in refused.stderr
    assert "10 jobs cancelled" in bulk(fleet, "cancel", batch_id).stdout
