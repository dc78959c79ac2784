"""Callbacks through real fleets: workers, senders that are killed, and receivers over HTTP."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import update

from models_db.callbacks import Callback, CallbackRecord, CallbackState, list_callbacks
from models_db.tables import JobState
from tests.fleet.fleet import PATIENCE_S, Fleet, WorkerProcess, wait_until
from tests.receiver import Receiver, Reply
from tests.servers import free_port
from workers.callbacks.signing import new_secret, signed_headers, verify_callback
from workers.client import Client

ROOT = Path(__file__).parents[2]
SECRET = new_secret()
MakeFleet = Callable[..., Fleet]


def to(*receivers: Receiver, **settings: Any) -> dict[str, Any]:
    """Settings of a fleet that may send to these receivers on loopback."""
    hosts = ",".join(f"127.0.0.1:{receiver.port}" for receiver in receivers)
    return {
        "callback_hosts": hosts,
        "callback_secrets": SECRET,
        "callback_allow_http": True,
        "callback_allow_private": True,
    } | settings


def command(fleet: Fleet, *words: str) -> WorkerProcess:
    """``tokenmill`` with the fleet's settings, as a process."""
    code = f"import sys; from workers.cli import main; sys.argv = ['tokenmill', *{words!r}]; main()"
    return fleet.add(WorkerProcess([sys.executable, "-c", code], environment=fleet.environment()), wait=False)


def records(fleet: Fleet) -> dict[str | None, CallbackRecord]:
    with fleet.engine.connect() as conn:
        return {record.job_id or record.batch_id: record for record in list_callbacks(conn, limit=1000)}


def settled(
    fleet: Fleet, state: CallbackState, timeout_s: float = PATIENCE_S
) -> dict[str | None, CallbackRecord]:
    def all_there() -> dict[str | None, CallbackRecord] | None:
        found = records(fleet)
        return found if all(record.state is state for record in found.values()) else None

    found = wait_until(all_there, timeout_s, f"all callbacks to be {state}")
    assert found is not None
    return found


def end_leases(fleet: Fleet) -> None:
    """Half a minute passes: what a dead sender had taken may be taken by others."""
    with fleet.engine.begin() as conn:
        past = update(Callback).where(Callback.state == CallbackState.DUE)
        conn.execute(past.values(due_at=Callback.created_at))


def test_every_end_is_told_exactly_once_by_a_worker(make_fleet: MakeFleet, any_database_url: str) -> None:
    with Receiver() as receiver:
        fleet = make_fleet(any_database_url, **to(receiver))
        supervisor = fleet.supervisor()
        with Client(fleet.settings) as client:
            jobs = [
                client.submit(
                    f"say {number}", max_tokens=4, callback_url=receiver.url(f"/{number}"), tenant="t"
                )
                for number in range(10)
            ]
            silent = client.submit("say nothing", max_tokens=4)
            answer = client.submit(
                "bring this along", max_tokens=3, callback_url=receiver.url(), callback_include_output=True
            )
        bare = fleet.send(callback_url=receiver.url("/bare"), max_tokens=2)
        told = receiver.wait_for(12)
        settled(fleet, CallbackState.DELIVERED)
        fleet.wait_all([silent.id])
        assert supervisor.stop() == 0
        events = [verify_callback(SECRET, request.headers, request.body) for request in told]
        assert Counter(event["data"]["id"] for event in events) == Counter(
            [*(job.id for job in jobs), answer.id, bare.id]
        )
        assert {event["type"] for event in events} == {"job.succeeded"}
        by_id = {event["data"]["id"]: event["data"] for event in events}
        assert by_id[answer.id]["text"] == "bring this along"
        assert not any("text" in data for job_id, data in by_id.items() if job_id != answer.id)
        assert {by_id[job.id]["tenant"] for job in jobs} == {"t"}
        assert len(receiver.received) == 12
        log = supervisor.log
    assert SECRET not in log
    assert "/bare" not in log


def test_a_job_whose_callback_no_worker_allows_fails_with_the_reason(make_fleet: MakeFleet) -> None:
    with Receiver() as receiver:
        fleet = make_fleet()
        fleet.worker()
        result = fleet.send(callback_url=receiver.url())
        fleet.wait_state(result.id, JobState.FAILED)
        status = fleet.status(result.id)
    assert status is not None
    assert "TOKENMILL_CALLBACK_HOSTS" in (status.error_message or "")
    assert records(fleet) == {}


def test_a_sender_that_is_killed_before_it_sends_leaves_all_to_the_next(make_fleet: MakeFleet) -> None:
    with Receiver() as receiver:
        fleet = make_fleet(**to(receiver))
        worker = fleet.worker()  # without a supervisor: nobody sends
        with Client(fleet.settings) as client:
            ids = [client.submit("x", max_tokens=2, callback_url=receiver.url()).id for _ in range(5)]
        fleet.wait_all(ids)
        worker.kill()
        assert {record.state for record in records(fleet).values()} == {CallbackState.DUE}
        assert receiver.received == []
        sender = command(fleet, "callbacks", "send")
        told = receiver.wait_for(5)
        settled(fleet, CallbackState.DELIVERED)
        assert sender.stop() == 0
        assert "5 delivered" in sender.log
        assert Counter(request.event["data"]["id"] for request in told) == Counter(ids)


def test_a_sender_that_is_killed_before_it_notes_it_is_followed_by_one_that_sends_again(
    make_fleet: MakeFleet,
) -> None:
    never = threading.Event()
    with Receiver(script=[Reply(before=lambda _: never.wait(30))]) as receiver:
        fleet = make_fleet(**to(receiver))
        fleet.worker()
        with Client(fleet.settings) as client:
            job = client.submit("x", max_tokens=2, callback_url=receiver.url())
        first = command(fleet, "callbacks", "send")
        receiver.wait_for(1)
        first.kill()
        never.set()
        assert records(fleet)[job.id].state is CallbackState.DUE
        second = command(fleet, "callbacks", "send")
        end_leases(fleet)
        one, two = receiver.wait_for(2)
        settled(fleet, CallbackState.DELIVERED)
        assert second.stop() == 0
        assert (one.id, one.body) == (two.id, two.body), "so that the receiver can tell"


def test_two_senders_tell_three_hundred_ends_once_each(make_fleet: MakeFleet, any_database_url: str) -> None:
    with Receiver() as receiver:
        fleet = make_fleet(any_database_url, **to(receiver))
        with Client(fleet.settings) as client:
            jobs = list(
                client.submit_many({"prompt": "x", "callback_url": receiver.url()} for _ in range(300))
            )
            for job in jobs:
                client.cancel(job.id)
        senders = [command(fleet, "callbacks", "send") for _ in range(2)]
        told = receiver.wait_for(300, timeout_s=60)
        settled(fleet, CallbackState.DELIVERED)
        assert [sender.stop() for sender in senders] == [0, 0]
        assert Counter(request.event["data"]["id"] for request in told) == Counter(job.id for job in jobs)
        assert len(receiver.received) == 300
        assert receiver.most_at_once <= 2 * fleet.settings.callback_host_connections
        assert {request.event["type"] for request in told} == {"job.cancelled"}


def test_a_redirect_is_refused_and_in_the_end_given_up_and_retried_by_hand(make_fleet: MakeFleet) -> None:
    with Receiver() as elsewhere, Receiver(Reply(307, {"location": elsewhere.url()})) as receiver:
        fleet = make_fleet(**to(receiver, elsewhere, callback_max_age_s=1.0))
        sender = command(fleet, "callbacks", "send")
        with Client(fleet.settings) as client:
            job = client.submit("x", callback_url=receiver.url("/a?token=hidden"))
            client.cancel(job.id)
        (record,) = settled(fleet, CallbackState.FAILED).values()
        assert record.error == "HTTP 307: redirects are not followed"
        assert elsewhere.received == []
        receiver.reply = Reply(204)
        retried = command(fleet, "callbacks", "retry", job.id)
        assert retried.wait() == 0
        assert "1 is sent again" in retried.log
        settled(fleet, CallbackState.DELIVERED)
        assert sender.stop() == 0
        assert len(set(receiver.ids)) == 1
        assert "hidden" not in sender.log
        assert f"tokenmill callbacks retry {record.id}" in sender.log


def test_loopback_is_refused_where_development_is_over(make_fleet: MakeFleet) -> None:
    """A name that resolves to this host: the list allows it, the address does not."""
    with Receiver() as receiver:
        hosts = f"localhost:{receiver.port}"
        fleet = make_fleet(**to(receiver, callback_hosts=hosts, callback_allow_private=False))
        sender = command(fleet, "callbacks", "send")
        with Client(fleet.settings) as client:
            job = client.submit("x", callback_url=receiver.url(host="localhost"))
            client.cancel(job.id)

        def said() -> str | None:
            return records(fleet)[job.id].error

        assert "localhost resolves to" in str(wait_until(said, PATIENCE_S, "the refusal"))
        assert sender.stop() == 0
        assert receiver.received == []


def test_a_batch_without_anybody_watching_tells_its_end(make_fleet: MakeFleet, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"custom_id": f"l{n}", "prompt": "x y"}) + "\n" for n in range(5)))
    with Receiver() as receiver:
        fleet = make_fleet(**to(receiver))
        fleet.supervisor()
        run = command(fleet, "bulk", "run", str(lines), "--no-wait", "--callback-url", receiver.url())
        assert run.wait() == 0, run.log
        (told,) = receiver.wait_for(1)
        event = verify_callback(SECRET, told.headers, told.body)
        assert event["type"] == "batch.completed"
        assert event["data"]["counts"] == {"succeeded": 5, "failed": 0, "cancelled": 0, "expired": 0}
        assert event["data"]["id"] in run.log
        settled(fleet, CallbackState.DELIVERED)


@pytest.mark.parametrize("kind", ["fastapi", "flask"])
def test_the_example_receivers_check_and_take_each_event_once(kind: str, tmp_path: Path) -> None:
    port = free_port()
    server = {
        "fastapi": [
            "uvicorn",
            "--app-dir",
            str(ROOT / "examples"),
            "receive_fastapi:app",
            "--port",
            str(port),
        ],
        "flask": ["flask", "--app", str(ROOT / "examples" / "receive_flask.py"), "run", "--port", str(port)],
    }[kind]
    process = WorkerProcess([sys.executable, "-m", *server], environment={"CALLBACK_SECRET": SECRET})
    try:
        url = f"http://127.0.0.1:{port}/tokenmill"
        wait_until(lambda: answers(url), 2 * PATIENCE_S, "the receiver to listen")
        event = {"id": "msg_1", "type": "job.succeeded", "data": {"id": "job-17", "finish_reason": "stop"}}
        body = json.dumps(event).encode()
        headers = signed_headers([SECRET], "msg_1", int(time.time()), body)
        for _ in range(2):
            assert httpx2.post(url, content=body, headers=headers).status_code == 204
        assert httpx2.post(url, content=body + b" ", headers=headers).status_code == 401
        process.wait_for("job.succeeded: job-17 stop")
        assert sum("job-17" in line for line in process.lines) == 1
    finally:
        process.kill()


def answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 405
    except httpx2.TransportError:
        return False
