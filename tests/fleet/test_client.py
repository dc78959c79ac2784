"""The client against a real Redis, database and worker (echo): submit, wait, cancel, and what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import func, select

import workers.client
from backend.api import RequestError, UnknownModelError
from backend.errors import short_repr
from models_db import jobs
from models_db.errors import DatabaseUnavailableError, IdempotencyConflictError, SchemaError, UnknownJobError
from models_db.session import reading
from models_db.tables import Job, JobState
from tests.fleet.echo_fleet import echo_fleet
from workers.broker import BrokerUnavailableError
from workers.client import (
    AsyncClient,
    Client,
    ConfigurationError,
    JobFailedError,
    JobHandle,
    JobNotFinishedError,
    NoDatabaseError,
    WaitTimeoutError,
)
from workers.demo import Demo
from workers.payload import queue_for

DEAD_REDIS = "redis://127.0.0.1:1/0"
IDLE = "nobody-serves-this"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with echo_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def client(fleet: Demo) -> Iterator[Client]:
    with Client(fleet.settings) as made:
        yield made


@pytest.fixture
def idle(fleet: Demo) -> Iterator[Client]:
    """A client of a model whose queue no worker consumes."""
    with Client(fleet.settings.model_copy(update={"model": IDLE})) as made:
        yield made


def jobs_in(client: Client) -> int:
    with reading(client.engine()) as connection:
        return connection.scalar(select(func.count()).select_from(Job)) or 0


def test_a_prompt_comes_back_with_its_counts(client: Client) -> None:
    job = client.submit("one two three", max_tokens=5)
    result = job.wait(20)
    assert (result.text, result.finish_reason) == ("one two three one two", "length")
    assert (result.prompt_tokens, result.completion_tokens) == (3, 5)
    status = job.status()
    assert (status.state, status.attempt) == (JobState.SUCCEEDED, 1)
    assert status.published_at is not None
    assert [attempt.outcome for attempt in client.attempts(job.id)] == ["succeeded"]
    assert client.result(job.id) == result


def test_messages_and_token_ids_are_prompts_too(client: Client) -> None:
    chat = client.submit(messages=[{"role": "user", "content": "hello there"}], max_tokens=2)
    ids = client.submit(token_ids=[7, 8], max_tokens=3, return_token_ids=True)
    assert chat.wait(20).text == "hello there"
    assert list(ids.wait(20).token_ids or ()) == [7, 8, 7]


def test_a_bad_request_raises_before_anything_is_stored(client: Client) -> None:
    before = jobs_in(client)
    bad: Sequence[Mapping[str, Any]] = [
        {},
        {"prompt": ""},
        {"prompt": "x", "token_ids": [1]},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "no_such_field": 1},
        {"prompt": "a\x00b"},
    ]
    for request in bad:
        with pytest.raises(RequestError):
            client.submit(**request)
    with pytest.raises(UnknownModelError, match="is not served here"):
        client.submit("x", model="another")
    assert jobs_in(client) == before


def test_a_random_job_gets_a_seed_that_is_stored_and_used(client: Client) -> None:
    job = client.submit("a b", temperature=1.0, max_tokens=1)
    with reading(client.engine()) as connection:
        params = connection.scalar(select(Job.params).where(Job.id == job.id))
    assert params is not None
    assert job.wait(20).seed == params["seed"]
    greedy = client.submit("a b", max_tokens=1)
    with reading(client.engine()) as connection:
        assert "seed" not in (connection.scalar(select(Job.params).where(Job.id == greedy.id)) or {})


def test_one_idempotency_key_is_one_job(client: Client) -> None:
    first = client.submit("same words", idempotency_key="order-17", max_tokens=2)
    again = client.submit("same words", idempotency_key="order-17", max_tokens=2)
    assert (first.created, again.created, again.id) == (True, False, first.id)
    with pytest.raises(IdempotencyConflictError, match="order-17"):
        client.submit("other words", idempotency_key="order-17", max_tokens=2)
    first.wait(20)
    assert len(client.attempts(first.id)) == 1


def test_a_random_request_repeats_under_its_key_although_its_seed_was_drawn(client: Client) -> None:
    first = client.submit("same words", idempotency_key="random-1", temperature=0.7, max_tokens=2)
    again = client.submit("same words", idempotency_key="random-1", temperature=0.7, max_tokens=2)
    assert again.id == first.id


def test_many_jobs_keep_their_order_and_a_bad_one_stops_them_all(client: Client) -> None:
    requests = ({"prompt": f"word{n}", "max_tokens": 1} for n in range(700))
    handles = client.submit_many(requests)
    assert len({handle.id for handle in handles}) == 700
    assert [client.wait(handle.id, 30).text for handle in handles[::100]] == [
        f"word{n}" for n in range(0, 700, 100)
    ]

    before = jobs_in(client)
    mixed = itertools.chain(({"prompt": "good", "max_tokens": 1} for _ in range(600)), [{"prompt": ""}])
    with pytest.raises(RequestError, match="prompt: must not be empty"):
        client.submit_many(mixed)
    assert jobs_in(client) == before


def test_many_jobs_are_submitted_also_where_nobody_looks_at_the_handles(client: Client) -> None:
    before = jobs_in(client)
    client.submit_many([{"prompt": "word", "max_tokens": 1}] * 3)
    assert jobs_in(client) - before == 3
    assert client.submit_many([]) == []


def test_what_stops_many_jobs_halfway_says_how_many_are_in(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, insert = jobs_in(client), jobs.insert_jobs

    def once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(jobs, "insert_jobs", away)
        return insert(*args, **options)

    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailableError("gone")

    monkeypatch.setattr(jobs, "insert_jobs", once)
    with pytest.raises(DatabaseUnavailableError) as caught:
        client.submit_many([{"prompt": "word", "max_tokens": 1}] * 700)
    monkeypatch.undo()
    assert caught.value.__notes__ == ["submit_many: the first 500 of 700 jobs have been accepted"]
    assert jobs_in(client) - before == 500


def test_each_of_any_number_of_jobs_is_submitted_as_its_handle_is_asked_for(client: Client) -> None:
    before, read = jobs_in(client), 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal read
        while True:
            read += 1
            yield {"prompt": "word", "max_tokens": 1}

    handles = client.submit_each(endless())
    assert jobs_in(client) == before
    next(handles)
    assert jobs_in(client) - before == 500
    assert read == 1000
    handles.close()  # type: ignore[attr-defined]

    before = jobs_in(client)
    mixed = itertools.chain(({"prompt": "good", "max_tokens": 1} for _ in range(600)), [{"prompt": ""}])
    accepted: list[JobHandle] = []
    with pytest.raises(RequestError, match="prompt: must not be empty"):
        accepted.extend(client.submit_each(mixed))
    assert jobs_in(client) - before == len(accepted) == 500  # the first chunk


@pytest.mark.parametrize(
    "key", ["", "k" * 256, "a\0b", "\ud800", 5, 10**5000, b"k", ["k"], float("nan")], ids=short_repr
)
def test_what_cannot_be_a_key_is_a_bad_request(client: Client, key: Any) -> None:
    before = jobs_in(client)
    with pytest.raises(RequestError, match="idempotency_key: ") as caught:
        client.submit("words", idempotency_key=key)
    assert caught.value.fix
    with pytest.raises(RequestError, match="idempotency_key: "):
        client.submit_many([{"prompt": "words"}, {"prompt": "words", "idempotency_key": key}])
    assert jobs_in(client) == before


@pytest.mark.parametrize("request_", ["abc", None, 5, [1]])
def test_what_is_no_request_is_refused(client: Client, request_: Any) -> None:
    with pytest.raises(RequestError, match="requests: must be a mapping"):
        client.submit_many([request_])


@pytest.mark.parametrize("requests", [5, None, "", "abc", b"", {}, {"prompt": "one"}])
def test_what_is_no_list_of_requests_is_refused(client: Client, requests: Any) -> None:
    for submit in (client.submit_many, client.submit_each):
        with pytest.raises(RequestError, match="requests: must be a list of requests") as caught:
            submit(requests)
        assert caught.value.fix


class Unprintable:
    """Of which Python can write nothing."""

    def __repr__(self) -> str:
        raise ValueError("nothing to write")


HUGE = 10**5000  # more digits than Python writes


@pytest.mark.parametrize(
    "fields",
    [
        {"deadline_s": 1e300},
        {"self": 1},
        {"deadline_s": float("inf")},
        {"top_k": HUGE},
        {"stop_token_ids": [HUGE]},
        {"logit_bias": {HUGE: 1.0}},
        {"version": HUGE},
        {"version": 2},
        {"tenant": Unprintable()},
    ],
    ids=short_repr,
)
def test_no_field_ends_in_anything_but_a_bad_request(client: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        client.submit("words", **fields)


@pytest.mark.parametrize(
    "last_id",
    [
        *("foo", "", "1-x", "-", "\u0661-0", "9" * 21, str(2**64), "0-" + "9" * 5000),
        *("1-0.1", "1-0.1.-2", "1-0.1.2.fin", "1-0.1.2.end.end", "1-0.1." + "9" * 11),
    ],
)
def test_what_is_no_id_of_an_event_is_refused_before_the_first_is_asked_for(
    client: Client, last_id: str
) -> None:
    with pytest.raises(RequestError, match="last_id: "):
        client.stream("any", last_id=last_id)
    with pytest.raises(RequestError, match="last_id: "):
        AsyncClient(client.settings).stream("any", last_id=last_id)


@pytest.mark.parametrize("timeout_s", ["3", float("nan"), True, [1], HUGE], ids=short_repr)
def test_what_is_no_time_to_wait_is_refused_before_anything_is_asked(client: Client, timeout_s: Any) -> None:
    for ask in (client.wait, client.stream, AsyncClient(client.settings).stream):
        with pytest.raises(RequestError, match=r"timeout_s: is not a number of seconds \(got "):
            ask("any", timeout_s=timeout_s)
    with pytest.raises(RequestError, match="timeout_s: "):
        asyncio.run(AsyncClient(client.settings).wait("any", timeout_s))


@pytest.mark.parametrize("job_id", ["a\0b", "\ud800", "x" * 5000, "", 5, HUGE, Unprintable()], ids=short_repr)
def test_an_id_that_no_job_can_have_is_unknown(client: Client, job_id: Any) -> None:
    for ask in (client.status, client.result, client.cancel, client.wait, client.stream):
        with pytest.raises(UnknownJobError) as caught:
            ask(job_id)
        str(caught.value).encode()


def test_what_a_client_is_made_with_is_named_where_it_is_of_another_type(client: Client) -> None:
    anything: Any = client.settings.broker_url
    with pytest.raises(ConfigurationError, match=r"settings: .* not str\. An address goes to broker_url="):
        Client(anything)
    anything = []
    for name in ("broker_url", "database_url"):
        with pytest.raises(ConfigurationError, match=f"{name}: must be a URL as text, not list"):
            Client(client.settings, **{name: anything})
    for threads in (0, "4", 1.5, True, None):
        anything = threads
        with pytest.raises(ConfigurationError, match="threads: must be a whole number above 0"):
            AsyncClient(client.settings, threads=anything)


def test_what_callers_catch_comes_from_one_place() -> None:
    named = {name for name in workers.client.__all__ if name.endswith("Error")}
    assert {
        "RequestError",
        "UnknownJobError",
        "IdempotencyConflictError",
        "DatabaseError",
        "BrokerUnavailableError",
    } <= named
    assert all(issubclass(getattr(workers.client, name), Exception) for name in named)


def test_an_accepted_job_survives_a_redis_that_is_away(fleet: Demo) -> None:
    with Client(fleet.settings, broker_url=DEAD_REDIS) as cut_off:
        job = cut_off.submit("still here", max_tokens=2)
        assert not job.published
        status = job.status()
    assert (status.state, status.published_at) == (JobState.QUEUED, None)


def test_a_job_is_kept_when_redis_refuses_it_and_the_database_goes_before_that_is_noted(
    fleet: Demo, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailableError("gone")

    with Client(fleet.settings, broker_url=DEAD_REDIS) as cut_off, monkeypatch.context() as patch:
        patch.setattr(jobs, "mark_unpublished", away)
        job = cut_off.submit("still here", max_tokens=2)
        assert not job.published
        assert job.status().published_at is not None
    # Nothing says that it was not published: the worker's sweeper sees that no list holds it.
    assert client.wait(job.id, 60).completion_tokens == 2


def test_without_a_database_redis_alone_carries_the_job(fleet: Demo, client: Client) -> None:
    with Client(fleet.settings, database_url=None) as light:
        job = light.submit("light as air", max_tokens=3)
        for call in (job.status, job.cancel, lambda: light.result(job.id), lambda: light.wait(job.id, 1)):
            with pytest.raises(NoDatabaseError, match="database_url"):
                call()
        with pytest.raises(NoDatabaseError):
            light.submit("x", idempotency_key="k")
    eventually(client, job.id)
    assert client.wait(job.id, 20).text == "light as air"
    with (
        Client(fleet.settings, broker_url=DEAD_REDIS, database_url=None) as nothing,
        pytest.raises(BrokerUnavailableError, match="TOKENMILL_BROKER_URL"),
    ):
        nothing.submit("x")


def test_plain_celery_can_send_a_job_and_get_its_result(fleet: Demo, client: Client) -> None:
    app = Celery(broker=fleet.settings.broker_url, backend=fleet.settings.celery_result_backend_url)
    payload = {"version": 1, "model": "smollm2", "prompt": "plain celery", "max_tokens": 2}
    sent = app.send_task("tokenmill.generate", args=[payload], queue=queue_for("smollm2"))
    assert sent.get(timeout=20)["text"] == "plain celery"
    assert client.result(sent.id).text == "plain celery"


def test_a_cancelled_job_says_so_when_waited_for(idle: Client) -> None:
    job = idle.submit("never run")
    with pytest.raises(JobNotFinishedError, match="is queued"):
        idle.result(job.id)
    with pytest.raises(WaitTimeoutError, match=r"still queued after 0\.1 s"):
        job.wait(0.1)
    assert job.cancel() is JobState.CANCELLED
    with pytest.raises(JobFailedError, match="was cancelled"):
        job.wait(20)


def test_a_request_that_only_the_worker_can_judge_fails_with_its_error(client: Client) -> None:
    job = client.submit("   ", max_tokens=2)
    with pytest.raises(JobFailedError, match="holds no word to echo") as caught:
        job.wait(20)
    assert caught.value.status.state is JobState.FAILED
    assert caught.value.status.error_type


def test_unknown_jobs_are_named(client: Client) -> None:
    for call in (client.status, client.result, client.cancel, client.wait):
        with pytest.raises(UnknownJobError, match="no-such-job"):
            call("no-such-job")


def test_a_database_without_tables_is_named(tmp_path: Path, fleet: Demo) -> None:
    with (
        Client(fleet.settings, database_url=f"sqlite:///{tmp_path / 'empty.db'}") as lost,
        pytest.raises(SchemaError, match="tokenmill db upgrade"),
    ):
        lost.submit("x")


def test_the_asyncio_client_does_the_same(fleet: Demo) -> None:
    async def talk() -> list[str]:
        settings = fleet.settings.model_copy(update={"models": (IDLE,)})
        async with AsyncClient(settings, threads=2) as client:
            jobs = [await client.submit(f"async {n}", max_tokens=2) for n in range(20)]
            results = await asyncio.gather(*(job.wait(20) for job in jobs))
            many = await client.submit_many([{"prompt": "and more", "max_tokens": 2}] * 3)
            results += [await client.wait(job.id, 20) for job in many]
            assert (await jobs[0].status()).state is JobState.SUCCEEDED
            assert await jobs[0].cancel() is JobState.SUCCEEDED
            assert await client.result(jobs[0].id) == results[0]
            idle = await client.submit("never run", model=IDLE)
            with pytest.raises(WaitTimeoutError):
                await idle.wait(0.05)
            assert await idle.cancel() is JobState.CANCELLED
            return [result.text for result in results]

    assert asyncio.run(talk()) == [*(f"async {n}" for n in range(20)), *["and more"] * 3]


def eventually(client: Client, job_id: str) -> None:
    """Wait until a worker has written the row of a job that came through Redis alone."""
    give_up = time.monotonic() + 20
    while True:
        try:
            client.status(job_id)
        except UnknownJobError:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        else:
            return
