"""``tokenmill callbacks``, and what ``doctor``, the metrics and the settings say about callbacks."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import Engine
from typer.testing import CliRunner

from backend.api import BackendInfo, BackendStats, ConfigurationError, RequestError
from models_db.callbacks import (
    CallbackState,
    NewCallback,
    claim_due,
    database_now,
    list_callbacks,
    record_failed,
)
from models_db.jobs import insert_jobs, request_cancel
from models_db.migrate import upgrade
from models_db.records import NewJob
from models_db.session import make_engine
from workers.bulk import BulkRunner
from workers.bulk_source import BulkSource
from workers.callbacks.service import start_sender
from workers.callbacks.signing import key_of, new_secret
from workers.callbacks.wanted import new_callback
from workers.cli import app
from workers.client import Client
from workers.doctor import Health, _callbacks
from workers.metrics import MetricsServer
from workers.payload import GeneratePayload
from workers.settings import Settings, load_settings

HOST = "hooks.example.com"
URL = f"https://{HOST}/done?token=hidden"


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    upgrade(url)
    return url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = make_engine(url)
    yield engine
    engine.dispose()


def run(url: str, *words: str, **environment: str) -> Result:
    return CliRunner().invoke(
        app, ["callbacks", *words], env={"TOKENMILL_DATABASE_URL": url, "COLUMNS": "200"} | environment
    )


def failed_callback(engine: Engine, job_id: str) -> str:
    """A job whose callback was given up; the callback's id."""
    job = NewJob("m", "tokenmill.m", {}, {}, id=job_id, callback=NewCallback(URL, HOST))
    with engine.begin() as conn:
        insert_jobs(conn, [job])
        request_cancel(conn, [job_id])
        (claim,) = claim_due(conn, HOST, 9, database_now(conn), timedelta(seconds=60))
        assert record_failed(conn, claim, "HTTP 410")
    return claim.id


def state_of(engine: Engine, job_id: str) -> CallbackState:
    with engine.connect() as conn:
        return list_callbacks(conn, ids=[job_id])[0].state


def test_list_shows_what_failed_and_no_query(url: str, engine: Engine) -> None:
    assert "There are none" in run(url, "list").stdout
    failed_callback(engine, "j1")
    shown = run(url, "list", "--state", "failed").stdout
    assert "j1" in shown
    assert "HTTP 410" in shown
    assert f"https://{HOST}/done" in shown
    (record,) = json.loads(run(url, "list", "j1", "--json").stdout)
    assert (record["state"], record["url"], record["tries"]) == ("failed", f"https://{HOST}/done", 1)
    assert json.loads(run(url, "list", "--state", "due", "--json").stdout) == []
    assert "hidden" not in shown + json.dumps(record)
    wrong = run(url, "list", "--state", "lost")
    assert wrong.exit_code == 2
    assert "--state" in wrong.output


def test_retry_takes_ids_or_all_and_not_both(url: str, engine: Engine) -> None:
    first, second = failed_callback(engine, "j1"), failed_callback(engine, "j2")
    for words in ([], [first, "--all"]):
        assert run(url, "retry", *words).exit_code == 2
    assert "1 is sent again" in run(url, "retry", "j1").stdout
    assert (state_of(engine, "j1"), state_of(engine, "j2")) == (CallbackState.DUE, CallbackState.FAILED)
    assert "0 are sent" in run(url, "retry", "--all", "--host", "elsewhere.example.com").stdout
    assert "1 is sent again" in run(url, "retry", "--all", "--host", HOST).stdout
    assert "0 are sent" in run(url, "retry", second).stdout


def test_prune_says_what_it_keeps_and_why(url: str, engine: Engine) -> None:
    ended = datetime.now(UTC) - timedelta(days=9)
    with engine.begin() as conn:
        job = NewJob("m", "tokenmill.m", {}, {}, id="j1", callback=NewCallback(URL, HOST), created_at=ended)
        insert_jobs(conn, [job])
        request_cancel(conn, ["j1"], at=ended)
    words = ["db", "prune", "--older-than", "7d", "--database-url", url]
    dry = CliRunner().invoke(app, [*words, "--dry-run"]).stdout
    assert "would keep 1 jobs and batches" in dry
    done = CliRunner().invoke(app, words).stdout
    assert "deleted 0 jobs" in done
    assert "kept 1 jobs and batches" in done
    assert "tokenmill callbacks list --state due" in done
    with engine.begin() as conn:
        (claim,) = claim_due(conn, HOST, 9, database_now(conn), timedelta(seconds=60))
        assert record_failed(conn, claim, "HTTP 410")
    done = CliRunner().invoke(app, words).stdout
    assert "deleted 1 jobs" in done
    assert "kept" not in done


def test_secret_prints_a_fresh_one(url: str) -> None:
    printed = {run(url, "secret").stdout.strip() for _ in range(2)}
    assert len(printed) == 2
    assert {len(key_of(secret)) for secret in printed} == {32}


def test_send_does_not_start_without_hosts_or_secret(url: str) -> None:
    off = run(url, "send")
    assert (off.exit_code, "TOKENMILL_CALLBACK_HOSTS" in off.output) == (3, True)
    unsigned = run(url, "send", TOKENMILL_CALLBACK_HOSTS=HOST)
    assert (unsigned.exit_code, "tokenmill callbacks secret" in unsigned.output) == (3, True)


def test_a_worker_that_is_to_send_and_cannot_does_not_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="TOKENMILL_CALLBACK_SECRETS"):
        start_sender(load_settings(database_url=url, callback_hosts=HOST))
    assert start_sender(load_settings(database_url=url, callback_hosts=HOST, callback_sender=False)) is None
    assert start_sender(load_settings(database_url=url)) is None


def test_a_sender_starts_and_stops(url: str) -> None:
    sender = start_sender(load_settings(database_url=url, callback_hosts=HOST, callback_secrets=new_secret()))
    assert sender is not None
    sender.stop()
    assert not sender._thread.is_alive()


# ------------------------------------------------------------------------------------------------------- settings


def test_secrets_are_never_shown_but_reach_the_workers_processes() -> None:
    secret = new_secret()
    settings = load_settings(
        callback_hosts=f"{HOST},.example.org:8443", callback_secrets=f"{secret},{secret}"
    )
    assert secret not in repr(settings)
    assert secret not in str(settings.model_dump())
    again = Settings.model_validate_json(settings.model_dump_json(exclude_unset=True))
    assert [it.get_secret_value() for it in again.callback_secrets] == [secret, secret]
    assert again.callback_hosts == (HOST, ".example.org:8443")


@pytest.mark.parametrize(
    "entry", ["https://x.example.com", "x.example.com/path", "*", ".", "*.example.com", "x:0"]
)
def test_an_entry_that_is_no_host_is_named(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="TOKENMILL_CALLBACK_HOSTS") as caught:
        load_settings(callback_hosts=entry)
    assert entry in str(caught.value)


def test_a_bad_secret_is_not_in_the_error() -> None:
    with pytest.raises(ConfigurationError, match="TOKENMILL_CALLBACK_SECRETS") as caught:
        load_settings(callback_secrets="correct-horse-battery")
    assert "horse" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- payload


def test_a_payload_is_held_against_the_list_and_its_answer_is_the_same() -> None:
    settings = load_settings(callback_hosts=HOST, model="m")
    fields = {"model": "m", "prompt": "x"}
    payload = GeneratePayload.parse(fields | {"callback_url": URL, "callback_include_output": True})
    payload.check_limits(settings)
    assert payload.content_hash() == GeneratePayload.parse(fields).content_hash()
    with pytest.raises(RequestError, match="TOKENMILL_CALLBACK_HOSTS") as caught:
        payload.check_limits(load_settings(model="m"))
    assert "hidden" not in str(caught.value)
    with pytest.raises(RequestError, match="callback_include_output"):
        GeneratePayload.parse(fields | {"callback_include_output": True})


def test_a_client_keeps_the_callback_with_the_job(url: str, engine: Engine) -> None:
    settings = load_settings(database_url=url, broker_url="redis://127.0.0.1:1/0", callback_hosts=HOST)
    with Client(settings) as client:
        job = client.submit("x", callback_url=URL)
        plain = client.submit("y")
        with pytest.raises(RequestError, match=r"evil\.org is not allowed"):
            client.submit("z", callback_url="https://evil.org/")
    with engine.connect() as conn:
        (record,) = list_callbacks(conn)
    assert (record.job_id, record.host, record.url, record.state) == (
        job.id,
        HOST,
        URL,
        CallbackState.WAITING,
    )
    assert plain.created


def test_a_batch_keeps_one_callback(url: str, engine: Engine) -> None:
    settings = load_settings(database_url=url, callback_hosts=HOST)
    with Client(settings) as client:
        runner = BulkRunner(client)
        source = BulkSource("x.jsonl", "0", 1)
        batch_id = runner.create("n", source, callback=new_callback(URL, settings))
        runner.create("without", source)
    with engine.connect() as conn:
        (record,) = list_callbacks(conn)
    assert (record.batch_id, record.state) == (batch_id, CallbackState.WAITING)
    with pytest.raises(RequestError, match="--callback-url"):
        new_callback("http://x", settings, field="--callback-url")


# ------------------------------------------------------------------------------------------------ doctor, metrics


def found(**settings: object) -> list[tuple[Health, str]]:
    return [(it.health, it.found + it.fix) for it in _callbacks(load_settings(**settings))]


def test_doctor_says_nothing_about_what_is_off_and_warns_of_what_is_open() -> None:
    assert found() == []
    secret = new_secret()
    good = found(callback_hosts=HOST, callback_secrets=secret)
    assert [health for health, _ in good] == [Health.OK]
    broken = found(callback_hosts=HOST)
    assert [health for health, _ in broken] == [Health.OK, Health.BROKEN]
    assert [it[0] for it in found(callback_hosts=HOST, callback_sender=False)] == [Health.OK]
    opened = found(
        callback_hosts=HOST, callback_secrets=secret, callback_allow_private=True, callback_allow_http=True
    )
    assert [health for health, _ in opened] == [Health.OK, Health.WARNING, Health.WARNING]
    assert "TOKENMILL_CALLBACK_ALLOW_PRIVATE" in opened[1][1]


@pytest.mark.parametrize("counts", [None, {"due": 3, "failed": 2}])
def test_the_metrics_count_what_is_due_and_what_was_given_up(counts: dict[str, int] | None) -> None:
    info = BackendInfo(
        backend="echo", model="m", device="cpu", dtype="none", slots=1, max_model_len=8, vocab_size=9
    )
    server = MetricsServer(
        "127.0.0.1",
        0,
        worker="w",
        info=info,
        stats=BackendStats,
        database=lambda: (True, 0),
        callbacks=lambda: counts,
    )
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tokenmill_callbacks"))
    assert sorted(values.values()) == ([] if counts is None else ["2.0", "3.0"])
