"""Runs through a real fleet (echo) that are interrupted, killed, left or cancelled, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import select

from models_db.batches import BatchProgress, request_cancel_batch, unpublished
from models_db.session import reading, transaction
from models_db.tables import BatchState, Job, JobState
from tests.fleet.bulk_world import IDLE, batch_id_of, bulk, lines, rows, run_batch, write
from tests.fleet.echo_fleet import echo_fleet
from workers.broker import Broker, BrokerUnavailableError
from workers.bulk import BulkRunner
from workers.bulk_input import LineOptions
from workers.bulk_source import BulkSource, validate_source
from workers.cli.common import ExitCode
from workers.client import Client
from workers.demo import Demo
from workers.payload import BULK_PRIORITY, queue_for, queue_key

TOKENS_PER_S = 100  # of each request, so that a long answer takes its time


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with echo_fleet(tmp_path_factory.mktemp("fleet"), ENGINE_ECHO_TOKENS_PER_S=str(TOKENS_PER_S)) as running:
        yield running


@pytest.fixture
def client(fleet: Demo) -> Iterator[Client]:
    settings = fleet.settings.model_copy(update={"models": (IDLE,)})
    with Client(settings) as made:
        yield made


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


KILLED_COMMAND = """
import os, signal, sys
from workers.cli import app
from workers.cli.bulk_work import Shown

moment, *arguments = sys.argv[1:]
replace = os.replace

def shown(self, progress):
    state = {"feeding": "validating", "watching": "in_progress"}.get(moment)
    some = progress.inserted if moment == "feeding" else progress.done
    if progress.state == state and 0 < some < progress.total:
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(draft, path):
    if moment == "replacing" and str(path).endswith("out.jsonl"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(draft, path)

Shown.__call__, os.replace = shown, deadly
app(["bulk", *arguments])
"""


def test_a_run_killed_at_any_moment_is_resumed_to_the_same_file(fleet: Demo, tmp_path: Path) -> None:
    """Killed while it feeds; then while it watches, with some answers in; then while it puts the files in place."""
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    manifest = tmp_path / "out.manifest.json"
    environment = os.environ | {
        "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
        "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
        "TOKENMILL_MODEL": fleet.settings.model,
    }

    def killed(moment: str, *arguments: str | Path) -> str | None:
        command = [sys.executable, "-c", KILLED_COMMAND, moment, *map(str, arguments), "-o", str(output)]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        return done.stderr if done.returncode == -signal.SIGKILL else None

    yesterday = {path: path.name.encode() for path in (output, tmp_path / "out.errors.jsonl", manifest)}
    for path, content in yesterday.items():
        path.write_bytes(content)
    for longest in (TOKENS_PER_S, 5 * TOKENS_PER_S, 25 * TOKENS_PER_S):
        slow = {"custom_id": "slow", "prompt": "a b c", "max_tokens": longest}
        source = write(tmp_path / "in.jsonl", [*rows(700), slow])
        fed = killed("feeding", "run", source, "--in-flight", "50")
        assert fed is not None
        batch_id = fed.split("Batch ", 1)[1].split(":", 1)[0]
        watched = killed("watching", "resume", batch_id)
        if watched is not None:
            break  # a machine that is held up may see no more than the end
    assert watched is not None
    counts = json.loads(bulk(fleet, "status", batch_id, "--json").stdout)["counts"]
    assert counts["succeeded"] > 0
    assert {path: path.read_bytes() for path in yesterday} == yesterday

    assert killed("replacing", "resume", batch_id) is not None
    assert (tmp_path / "out.errors.jsonl").read_bytes() == b""
    assert output.read_bytes() == yesterday[output]
    assert not manifest.exists()

    assert bulk(fleet, "resume", batch_id, "-o", output).exit_code == 0
    assert json.loads(manifest.read_text())["results"] == len(lines(output)) == 701
    assert bulk(fleet, "run", source, "-o", whole).exit_code == 0
    timed = {"job_id", "seed", "queue_time_s", "time_to_first_token_s", "latency_s", "cached_tokens"}

    def stable(path: Path) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if name not in timed} for line in lines(path)]

    assert stable(output) == stable(whole)


def test_once_all_lines_are_in_a_changed_file_costs_only_its_own_keys(fleet: Demo, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", [rows(1)[0] | {"answer": 1}]), tmp_path / "out.jsonl"
    done = bulk(fleet, "run", source, "-o", output)
    write(source, rows(2))
    again = bulk(fleet, "resume", batch_id_of(done), "-o", output)
    assert again.exit_code == 0, again.output
    assert "has changed since the batch was made: keys of the input are not carried through" in again.stderr
    assert "answer" not in lines(output)[0]


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
