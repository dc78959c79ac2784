"""The shipped examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import Select, select

from models_db.tables import Job, JobState
from tests.fleet.echo_fleet import echo_fleet
from tests.fleet.fleet import PATIENCE_S, wait_until
from tests.servers import free_port
from workers.client import Client
from workers.demo import PROMPTS

EXAMPLES = PROMPTS.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a shell would have: the URLs of a fleet that says sixty words a second, and the command on PATH."""
    with echo_fleet(tmp_path_factory.mktemp("fleet"), ENGINE_ECHO_TOKENS_PER_S="60") as fleet:
        yield os.environ | {
            "TOKENMILL_BROKER_URL": fleet.settings.broker_url,
            "TOKENMILL_DATABASE_URL": fleet.settings.database_url,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }


def guide(name: str) -> str:
    return (EXAMPLES.parent / "docs" / name).read_text(encoding="utf-8")


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_enqueue_submits_waits_and_prints(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run([sys.executable, str(EXAMPLES / "enqueue.py")], environment, tmp_path).splitlines()
    assert printed[0].startswith("Why is the sky blue?")
    assert [line.split("'")[1][:26] for line in printed[1:]] == [
        "Name one thing made of woo",
        "Name one thing made of gla",
        "Name one thing made of iro",
    ]


def test_plain_celery_needs_none_of_our_modules(environment: dict[str, str], tmp_path: Path) -> None:
    script = EXAMPLES / "send_task.py"
    source = script.read_text(encoding="utf-8")
    assert not any(f"import {name}" in source or f"from {name}" in source for name in ("workers", "backend"))
    assert "Name three colours." in run([sys.executable, str(script)], environment, tmp_path)


def test_the_nightly_script_writes_dated_answers(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS.read_bytes())
    run([str(EXAMPLES / "nightly.sh"), str(tmp_path)], environment, tmp_path)
    (answers,) = (path for path in tmp_path.glob("answers-*.jsonl") if "errors" not in path.name)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    given = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert [(line["custom_id"], line["category"]) for line in lines] == [
        (line["custom_id"], line["category"]) for line in given
    ]
    assert "30/30 done" in (tmp_path / "nightly.log").read_text(encoding="utf-8")


def test_the_nightly_script_runs_from_a_crontab_as_its_comment_says(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Cron gives little more than a short PATH, and the variables that stand in the crontab."""
    script = EXAMPLES / "nightly.sh"
    comment = [
        line[1:].strip() for line in script.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    crontab = dict(line.split("=", 1) for line in comment if line.split("=")[0].isupper())
    assert crontab.keys() == {"PATH", "TOKENMILL_BROKER_URL", "TOKENMILL_DATABASE_URL"}
    assert all(f"{name}=" in guide("nightly-bulk.md") for name in crontab)
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS.read_bytes())
    bare = {"HOME": str(tmp_path), "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}

    def cron(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", "-c", f"{script} {tmp_path}"]
        return subprocess.run(
            command, env=bare | variables, cwd="/", capture_output=True, text=True, timeout=120
        )

    forgotten = cron({})
    assert forgotten.returncode == 127
    assert "no tokenmill on PATH" in forgotten.stderr
    path = crontab["PATH"].replace("/srv/app/venv/bin", str(Path(sys.executable).parent))
    done = cron({name: environment[name] for name in crontab} | {"PATH": path})
    assert done.returncode == 0, (tmp_path / "nightly.log").read_text(encoding="utf-8")
    (answers,) = tmp_path.glob("answers-????-??-??.jsonl")
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 30


def test_the_nightly_beat_submits_at_a_quarter_past_one(environment: dict[str, str], tmp_path: Path) -> None:
    """The command of its docstring loads it, and its task submits the file."""
    source = (EXAMPLES / "nightly_beat.py").read_text(encoding="utf-8")
    (command,) = (line.split() for line in source.splitlines() if line.startswith("    celery "))
    assert command[-2:] == ["worker", "--beat"]
    report = run([sys.executable, "-m", *command[:-2], "report"], environment, EXAMPLES.parent)
    assert "<crontab: 15 1 * * *" in report
    check = (
        "import sys; sys.path.insert(0, sys.argv[1]); import nightly_beat as night\n"
        "from datetime import UTC, datetime\n"
        "from celery.beat import Scheduler\n"
        "night.app.finalize()\n"
        "scheduler = Scheduler(night.app)\n"
        "entry = scheduler.schedule['prompts']\n"
        "entry.schedule.nowfun = lambda: datetime(2026, 11, 30, 1, 15, tzinfo=UTC)\n"
        "entry.last_run_at = datetime(2026, 11, 29, 1, 15, tzinfo=UTC)\n"
        "assert entry.is_due().is_due and entry.task in night.app.tasks\n"
        "print(night.app.tasks[entry.task](*entry.args))\n"
    )
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS.read_bytes())
    batch_id = run([sys.executable, "-c", check, str(EXAMPLES)], environment, tmp_path).strip()
    collect = [sys.executable, "-m", "workers.cli", "bulk", "resume", batch_id, "-o", "answers.jsonl"]
    run(collect, environment, tmp_path)
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 30


AIRFLOW = """
import subprocess, sys, time, types

class PokeReturnValue:
    def __init__(self, is_done, xcom_value=None):
        self.is_done, self.xcom_value = is_done, xcom_value

commands = []
def bash(function):
    def run(*arguments):  # as Airflow's: the last line of what the command prints is handed on
        commands.append(function(*arguments))
        done = subprocess.run(commands[-1], shell=True, check=True, stdout=subprocess.PIPE, text=True)
        return (done.stdout.splitlines() or [""])[-1]
    return run

def sensor(**options):
    assert options["mode"] == "reschedule" and options["timeout"] > options["poke_interval"]
    def wrap(function):
        def run(*arguments):
            for _ in range(300):
                poked = function(*arguments)
                if poked.is_done:
                    return poked.xcom_value
                time.sleep(0.1)
            raise TimeoutError
        return run
    return wrap

def module(name, **names):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(names)

dags = []
def dag(**options):
    dags.append(options)
    return lambda function: function

module("airflow")
module("airflow.decorators", dag=dag, task=types.SimpleNamespace(bash=bash, sensor=sensor))
module("airflow.sensors")
module("airflow.sensors.base", PokeReturnValue=PokeReturnValue)
sys.path.insert(0, sys.argv[1])
import nightly_airflow
assert dags[0]["schedule"] == "15 1 * * *" and dags[0]["catchup"] is False
"""


AIRFLOW_STATUS = """
def ends(status):
    stand_in = f"tokenmill() {{ return {status}; }}; {commands[-1]}"
    return subprocess.run(["bash", "-c", stand_in]).returncode == 0

assert "bulk resume" in commands[-1]
assert [ends(status) for status in (0, 1, 2, 3, 130)] == [True, True, False, False, False]
"""


def test_the_nightly_dag_submits_waits_and_collects(environment: dict[str, str], tmp_path: Path) -> None:
    """With stand-ins for Airflow's decorators, which run each task as soon as it is called.

    A line that failed does not fail the night; whatever else the last command's exit status says, does.
    """
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS.read_bytes() + b'{"custom_id": "bad"}\n')
    folder = {"NIGHTLY_FOLDER": str(tmp_path)}
    run([sys.executable, "-c", AIRFLOW + AIRFLOW_STATUS, str(EXAMPLES)], environment | folder, tmp_path)
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 30
    (bad,) = (tmp_path / "answers.errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(bad)["custom_id"] == "bad"


# --------------------------------------------------------------------------------------------- web applications

SERVERS = {
    "fastapi": ["-m", "uvicorn", "web_fastapi:app", "--app-dir", str(EXAMPLES), "--port", "{port}"],
    "flask": ["-m", "flask", "--app", str(EXAMPLES / "web_flask.py"), "run", "--port", "{port}"],
    "django": [str(EXAMPLES / "web_django.py"), "runserver", "--noreload", "{port}"],
}


@contextmanager
def serving(name: str, environment: dict[str, str], folder: Path) -> Iterator[str]:
    """The address of the running example."""
    port = free_port()
    command = [sys.executable, *(part.format(port=port) for part in SERVERS[name])]
    with (folder / "web.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx2.get(f"{url}/questions").status_code == 405  # it can only be posted to
            except httpx2.TransportError:
                assert process.poll() is None, (folder / "web.log").read_text()
                return False

        try:
            wait_until(answers, 60, "the application to answer")
            yield url
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def running(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """The addresses of the example applications by name; each is started when it is first asked for, and once.

    Their tenant may have two questions open.
    """
    limited = environment | {"TOKENMILL_TENANT_LIMITS": '{"web": {"jobs": 2}}'}
    addresses: dict[str, str] = {}
    with ExitStack() as stack:

        def of(name: str) -> str:
            if name not in addresses:
                addresses[name] = stack.enter_context(serving(name, limited, tmp_path_factory.mktemp(name)))
            return addresses[name]

        yield of


@pytest.fixture(params=sorted(SERVERS))
def web(
    request: pytest.FixtureRequest, running: Callable[[str], str], environment: dict[str, str]
) -> Iterator[str]:
    """The address of each example application in turn; its tenant has nothing open."""
    yield running(request.param)
    cancel_all(environment)


def cancel_all(environment: dict[str, str]) -> None:
    """End every question that is open."""
    with Client(
        broker_url=environment["TOKENMILL_BROKER_URL"], database_url=environment["TOKENMILL_DATABASE_URL"]
    ) as client:
        open_jobs = select(Job.id).where(Job.state.in_((JobState.QUEUED, JobState.RUNNING)))
        with client.engine().connect() as conn:
            ids = list(conn.scalars(open_jobs))
        for job_id in ids:
            client.cancel(job_id)
        wait_until(lambda: not _any(client, open_jobs), PATIENCE_S, "all questions to end")


def _any(client: Client, query: Select[tuple[str]]) -> bool:
    with client.engine().connect() as conn:
        return conn.scalar(query) is not None


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event."""

    id: str
    kind: str
    data: Any


def events(address: str, last_id: str = "") -> Iterator[Event]:
    """The answer's events as they come."""
    headers = {"last-event-id": last_id} if last_id else {}
    with httpx2.stream("GET", f"{address}/events", headers=headers, timeout=30) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
                continue
            yield Event(fields["id"], fields["event"], json.loads(fields["data"]))
            fields = {}


def test_each_web_example_accepts_streams_and_answers(web: str) -> None:
    accepted = httpx2.post(f"{web}/questions", json={"text": "one two three"})
    assert accepted.status_code == 202
    address = f"{web}/questions/{accepted.json()['id']}"
    *pieces, end = events(address)
    assert (end.kind, end.data["state"]) == ("end", "succeeded")
    assert end.data["completion_tokens"] > 0
    text = "".join(event.data for event in pieces if event.kind == "text")
    assert httpx2.get(address).json()["text"] == text != ""
    refused = httpx2.post(f"{web}/questions", json={"text": "nul \x00"})
    assert refused.status_code == 422
    assert "NUL" in refused.text
    for body in ({}, {"text": 5}, [1]):
        assert httpx2.post(f"{web}/questions", json=body).status_code == 422
    for path in ("none", "none/events"):
        assert httpx2.get(f"{web}/questions/{path}").status_code == 404


def test_each_web_example_sends_text_before_the_answer_is_whole_and_resumes(web: str) -> None:
    for count in (40, 120, 240):  # a machine that is held up may see no more than the end of a short one
        words = " ".join(f"word{number}" for number in range(count))
        accepted = httpx2.post(f"{web}/questions", json={"text": words})
        address = f"{web}/questions/{accepted.json()['id']}"
        got = ""
        for event in events(address):
            assert event.kind == "text"
            got += event.data
            if "word2" in got:
                break  # the connection is lost here
        if (state := httpx2.get(address).json()["state"]) == "running":
            break
    assert state == "running", "text came while the answer was being made"
    *pieces, end = events(address, last_id=event.id)
    rest = "".join(each.data for each in pieces)
    assert len(pieces) > 1
    assert end.data["state"] == "succeeded"
    assert got + rest == httpx2.get(address).json()["text"], "nothing is missing and nothing came twice"


def test_each_web_example_refuses_a_wrong_last_id_before_it_begins_to_answer(web: str) -> None:
    accepted = httpx2.post(f"{web}/questions", json={"text": "one two three"})
    address = f"{web}/questions/{accepted.json()['id']}/events"
    for wrong in ("foo", "1-x", "9" * 30):
        refused = httpx2.get(address, headers={"last-event-id": wrong})
        assert refused.status_code == 422, "a browser takes it as final, where it would ask again after a 200"
        assert "last_id: is not the id of an event" in refused.text


def test_each_web_example_asks_a_full_tenant_to_come_again(web: str, environment: dict[str, str]) -> None:
    words = " ".join(f"word{number}" for number in range(240))
    first, second = (httpx2.post(f"{web}/questions", json={"text": words}) for _ in range(2))
    assert (first.status_code, second.status_code) == (202, 202)
    refused = httpx2.post(f"{web}/questions", json={"text": "one more"})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert "sk again" in refused.text
    cancel_all(environment)
    *_, end = events(f"{web}/questions/{first.json()['id']}")
    assert end.data["state"] == "cancelled"
    assert httpx2.post(f"{web}/questions", json={"text": "one more"}).status_code == 202


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_each_web_example_says_that_the_service_is_away_and_not_where_it_is(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    away = environment | {"TOKENMILL_DATABASE_URL": f"postgresql://someone@127.0.0.1:{free_port()}/secret"}
    with serving(name, away, tmp_path) as web:
        answers = [
            httpx2.post(f"{web}/questions", json={"text": "is anybody there?"}, timeout=30),
            httpx2.get(f"{web}/questions/none", timeout=30),
            httpx2.get(f"{web}/questions/none/events", timeout=30),
        ]
        if name == "fastapi":  # the one that has a way to stop
            answers.append(httpx2.post(f"{web}/questions/none/cancel", timeout=30))
    for answer in answers:
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
        assert "cannot be reached now" in answer.text
        assert "secret" not in answer.text


@pytest.mark.parametrize("web", ["fastapi"], indirect=True)
def test_the_fastapi_example_refuses_a_key_that_belongs_to_another_question(web: str) -> None:
    key = {"idempotency-key": "example-1"}
    assert httpx2.post(f"{web}/questions", json={"text": "one"}, headers=key).status_code == 202
    assert httpx2.post(f"{web}/questions", json={"text": "two"}, headers=key).status_code == 409
    long = httpx2.post(f"{web}/questions", json={"text": "one"}, headers={"idempotency-key": "k" * 300})
    assert long.status_code == 422
    assert "idempotency_key: has 300 characters" in long.text
    assert httpx2.post(f"{web}/questions/none/cancel").status_code == 404
