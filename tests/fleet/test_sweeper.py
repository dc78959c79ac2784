"""Lost messages are published again, once, whatever lost them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kombu import Connection
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import Engine, update

from models_db.base import utcnow
from models_db.claims import ClaimItem, claim
from models_db.dead_letters import list_dead_letters
from models_db.deaths import SUSPECT_DEATHS
from models_db.jobs import insert_jobs, mark_callbacks_sent, mark_published, request_cancel
from models_db.records import NewJob
from models_db.session import make_engine
from models_db.tables import Job, JobState
from models_db.transitions import end_jobs
from models_db.workers import NewWorker, register_worker
from tests.fleet.fleet import RedisServer
from tests.fleet.rows import refusing
from tests.messages import build_message, publish
from tests.servers import migrate
from workers.payload import GeneratePayload, queue_for
from workers.queues import QueueView
from workers.sweeper import Sweeper
from workers.transport import DEAD_LETTERS_KEY, unreadable

T = TypeVar("T")
QUEUE = queue_for("echo")


class Inline:
    """A database thread without a thread; ``away`` makes every call fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.away = False

    def call(self, work: Callable[[SqlConnection], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            if self.away:
                raise ConnectionError("the database is away")
            with self._engine.begin() as conn:
                value = work(conn)
        except Exception as exc:
            future.set_exception(exc)
        else:
            future.set_result(value)
        return future


class Place:
    """One queue with its database, and as many sweepers as a test wants."""

    def __init__(self, server: RedisServer, engine: Engine) -> None:
        self.server = server
        self.redis = server.client
        self.redis.flushall()
        self.engine = engine
        self.seconds = 1000.0
        self.views: list[QueueView] = []

    def sweeper(self, name: str = "s") -> Sweeper:
        url = self.server.url
        self.views.append(QueueView(lambda: Connection(url), QUEUE))
        made = Sweeper(Inline(self.engine), self.views[-1], name, QUEUE, clock=lambda: self.seconds)
        made.begin()
        return made

    def pass_time(self, seconds: int, *sweepers: Sweeper) -> None:
        for _ in range(seconds):
            self.seconds += 1.01
            for sweeper in sweepers:
                sweeper.run_pending()

    def accept(self, count: int, *, published: bool = True, start: int = 0, **fields: Any) -> list[str]:
        payload = GeneratePayload.parse({"model": "echo", "prompt": "some words"} | fields)
        ids = [f"job-{n:05}" for n in range(start, start + count)]
        jobs = [
            NewJob(
                id=job_id,
                model="echo",
                queue=QUEUE,
                params={},
                prompt={},
                priority=payload.priority,
                message=build_message(job_id, payload),
            )
            for job_id in ids
        ]
        with self.engine.begin() as conn:
            insert_jobs(conn, jobs)
        if published:
            publish(self.redis.pipeline(), [job.message for job in jobs if job.message])
            with self.engine.begin() as conn:
                mark_published(conn, ids)
        return ids

    def listed(self) -> list[str]:
        """Ids of the messages that wait."""
        raws = [raw for key in self.redis.keys(f"{QUEUE}*") for raw in self.redis.lrange(key, 0, -1)]
        return sorted(json.loads(raw)["headers"]["id"] for raw in raws)


@pytest.fixture
def place(redis_server: RedisServer, tmp_path: Path) -> Iterator[Place]:
    url = f"sqlite:///{tmp_path / 'sweeper.db'}"
    migrate(url)
    engine = make_engine(url)
    made = Place(redis_server, engine)
    yield made
    for view in made.views:
        view.close()
    engine.dispose()


def test_a_message_that_no_list_holds_is_published_again_once(place: Place) -> None:
    ids = place.accept(5)
    sweeper = place.sweeper()
    place.pass_time(5, sweeper)
    assert place.listed() == ids, "nothing is missing"
    place.redis.rpop(QUEUE + "\x06\x163")  # taken, and never noted as unacknowledged
    place.pass_time(5, sweeper)
    assert place.listed() == ids
    place.pass_time(5, sweeper)
    assert place.listed() == ids, "not again"


def test_what_was_never_published_is_and_what_redis_lost_comes_back(place: Place) -> None:
    ids = place.accept(1200) + place.accept(3, published=False, start=1200, priority=9)
    sweeper = place.sweeper()
    place.pass_time(5, sweeper)
    assert place.listed() == ids
    place.redis.flushall()
    place.pass_time(6, sweeper)
    assert place.listed() == ids


def test_an_unacknowledged_delivery_is_not_lost(place: Place) -> None:
    ids = place.accept(3)
    raw = place.redis.rpop(QUEUE + "\x06\x163")
    assert isinstance(raw, bytes)
    place.redis.hset("unacked", "a-tag", json.dumps([json.loads(raw), "", QUEUE]))
    place.redis.hset("unacked", "nonsense", "no json")
    sweeper = place.sweeper()
    place.pass_time(8, sweeper)
    assert place.listed() == ids[1:]


def test_a_message_that_returns_between_two_looks_is_not_doubled(place: Place) -> None:
    ids = place.accept(3)
    sweeper = place.sweeper()
    place.pass_time(1, sweeper)
    raw = place.redis.rpop(QUEUE + "\x06\x163")
    assert isinstance(raw, bytes)
    place.pass_time(2, sweeper)
    place.redis.lpush(QUEUE + "\x06\x163", raw)
    place.pass_time(5, sweeper)
    assert place.listed() == ids


def test_a_lost_message_behind_a_surplus_of_others_is_found_later(place: Place) -> None:
    ids = place.accept(2)
    message = json.loads(place.redis.lindex(QUEUE + "\x06\x163", 0) or b"")
    for n in range(5):  # messages without rows, as a bare send_task leaves them
        message["headers"]["id"] = f"bare-{n}"
        place.redis.lpush(QUEUE + "\x06\x163", json.dumps(message))
    place.redis.rpop(QUEUE + "\x06\x163")
    sweeper = place.sweeper()
    place.pass_time(64, sweeper)
    assert set(ids) <= set(place.listed())
    assert len(place.listed()) == 7


def test_two_sweepers_at_once_publish_once(place: Place) -> None:
    ids = place.accept(50)
    a, b = place.sweeper("a"), place.sweeper("b")
    place.redis.flushall()
    for _ in range(12):
        place.redis.delete(f"tokenmill.sweeper.{QUEUE}")  # each believes itself elected
        place.pass_time(1, a)
        place.redis.delete(f"tokenmill.sweeper.{QUEUE}")
        b.run_pending()
    assert place.listed() == ids


def test_suspects_and_running_jobs_are_left_alone(place: Place) -> None:
    suspect, running, queued = place.accept(3)
    with place.engine.begin() as conn:
        register_worker(conn, NewWorker("w", "h", 1, "0", "echo", "echo", id="w"))
        conn.execute(update(Job).where(Job.id == suspect).values(deaths=SUSPECT_DEATHS))
        job = NewJob(id=running, model="echo", queue=QUEUE, params={}, prompt={})
        claim(conn, [ClaimItem(job)], "w")
    place.redis.flushall()
    sweeper = place.sweeper()
    place.pass_time(8, sweeper)
    assert place.listed() == [queued]


def test_a_dead_workers_jobs_are_published_by_one_of_those_who_bury_it(place: Place) -> None:
    ids = place.accept(3)
    with place.engine.begin() as conn:
        register_worker(conn, NewWorker("w", "h", 1, "0", "echo", "echo", id="w"))
        items = [ClaimItem(NewJob(id=it, model="echo", queue=QUEUE, params={}, prompt={})) for it in ids]
        claim(conn, items, "w")
    place.redis.flushall()
    a, b = place.sweeper("a"), place.sweeper("b")
    for sweeper in (a, b, a):
        sweeper.bury(["w"])
        sweeper.run_pending()
    assert place.listed() == ids


def test_sweeping_waits_while_redis_or_the_database_is_away(place: Place) -> None:
    ids = place.accept(2)
    place.redis.flushall()
    store = Inline(place.engine)
    view = QueueView(lambda: Connection(place.server.url), QUEUE)
    nowhere = QueueView(lambda: Connection("redis://127.0.0.1:1/0"), QUEUE)
    lost = Sweeper(store, nowhere, "lost", QUEUE, clock=lambda: place.seconds)
    sweeper = Sweeper(store, view, "s", QUEUE, clock=lambda: place.seconds)
    lost.begin()
    sweeper.begin()
    store.away = True
    place.pass_time(4, lost, sweeper)
    assert place.listed() == []
    store.away = False
    place.pass_time(5, lost, sweeper)
    assert place.listed() == ids
    view.close()


class Silent:
    """The database thread of a worker that is cut off from its database."""

    def call(self, work: Callable[[Any], Any]) -> Future[Any]:
        return Future()


def test_a_worker_without_its_database_does_not_keep_others_from_sweeping(place: Place) -> None:
    view = QueueView(lambda: Connection(place.server.url), QUEUE)
    place.views.append(view)
    cut_off = Sweeper(Silent(), view, "cut off", QUEUE, clock=lambda: place.seconds)
    cut_off.begin()
    place.pass_time(1, cut_off)
    well = place.sweeper("well")
    ids = place.accept(2, published=False)
    lease = f"tokenmill.sweeper.{QUEUE}"
    assert place.redis.get(lease) == b"cut off"
    place.pass_time(5, cut_off, well)
    place.redis.delete(lease)  # its time is Redis's own
    place.pass_time(1, cut_off)
    assert place.redis.get(lease) is None, "it does not take it again"
    place.pass_time(4, cut_off, well)
    assert place.listed() == ids


def test_an_end_that_could_not_be_announced_is_announced_later(place: Place) -> None:
    (job_id,) = place.accept(1, published=False)
    with place.engine.begin() as conn:
        end_jobs(conn, [job_id], JobState.CANCELLED, utcnow())
    sweeper = place.sweeper()
    view = place.views[-1]
    reachable, view._connect = view._connect, lambda: Connection("redis://127.0.0.1:1/0")
    sweeper.announce([job_id])
    place.pass_time(2, sweeper)
    assert place.listed() == []
    view._connect = reachable
    place.pass_time(2, sweeper)
    assert place.listed() == [job_id]


def test_the_cancel_of_a_suspect_that_waits_is_told_once_redis_can_be_reached(place: Place) -> None:
    """No delivery may start a suspect, so that none is left that would tell Celery of this end."""
    *cancelled, queued, plain, told = place.accept(5)
    with place.engine.begin() as conn:
        suspects = [*cancelled, queued, told]
        conn.execute(update(Job).where(Job.id.in_(suspects)).values(deaths=SUSPECT_DEATHS))
        request_cancel(conn, [*cancelled, plain, told])
        mark_callbacks_sent(conn, [told])
    place.redis.flushall()
    sweeper = place.sweeper()
    publish = sweeper._view.publish
    refused: list[int] = []

    def refuse(messages: Any) -> None:
        refused.append(len(messages))
        raise ConnectionError("Redis is away")

    sweeper._view.publish = refuse  # type: ignore[method-assign]
    place.pass_time(3, sweeper)
    assert set(refused) == {2}
    sweeper._view.publish = publish  # type: ignore[method-assign]
    place.pass_time(1, sweeper)
    assert place.listed() == cancelled
    place.redis.flushall()  # a worker has taken them
    place.pass_time(5, sweeper)
    assert place.listed() == [], "not again"


def test_dead_letters_go_into_the_table(place: Place) -> None:
    letter = {"id": "l1", "queue": QUEUE, "worker_id": "w", "reason": "it is no JSON", "message": "{\x00"}
    place.redis.lpush(DEAD_LETTERS_KEY, json.dumps(letter))
    sweeper = place.sweeper()
    place.pass_time(2, sweeper)
    with place.engine.connect() as conn:
        (kept,) = list_dead_letters(conn)
    assert (kept.id, kept.queue, kept.reason) == ("l1", QUEUE, "it is no JSON")
    assert place.redis.llen(DEAD_LETTERS_KEY) == 0


def test_a_dead_letter_that_nobody_can_read_is_kept_whole_and_stops_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"id": "good", "queue": QUEUE, "worker_id": "w", "reason": "it is no JSON", "message": "{"}
    newer = good | {"id": "newer", "novel": {"seen": 1}, "received_at": "2027-01-01"}
    unfit: list[Any] = [[], good | {"id": 7}, good | {"id": "x" * 99}, good | {"worker_id": "\x00"}]
    unfit += [good | {"job_id": 1}, {name: value for name, value in good.items() if name != "reason"}]
    raws = [b"\xff\xfe no JSON", *(json.dumps(each).encode() for each in (*unfit, newer, good))]
    for raw in raws:
        place.redis.lpush(DEAD_LETTERS_KEY, raw)
    ids = place.accept(2, published=False)
    place.pass_time(5, place.sweeper())
    with place.engine.connect() as conn:
        kept = {letter.id: letter for letter in list_dead_letters(conn)}
    assert len(kept) == len(raws), "none is dropped"
    assert kept.pop("good").message == "{"
    assert json.loads(kept["newer"].message) == newer
    assert kept.pop("newer").reason.startswith("it is no JSON (put aside by a newer worker")
    assert {letter.queue for letter in kept.values()} == {QUEUE}
    messages = {letter.message for letter in kept.values()}
    assert messages == {r"\xff\xfe no JSON", *(json.dumps(each) for each in unfit)}
    assert "cannot be read" in caplog.text
    assert place.redis.llen(DEAD_LETTERS_KEY) == 0
    assert place.listed() == ids


def test_a_dead_letter_that_the_database_refuses_keeps_no_other(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    letters = [
        {"id": name, "queue": QUEUE, "worker_id": "w", "reason": "no JSON", "message": "{"} for name in "abc"
    ]
    for letter in letters:
        place.redis.lpush(DEAD_LETTERS_KEY, json.dumps(letter))
    with refusing(place.engine, "NEW.id = 'b'", "dead_letter", "INSERT"):
        place.pass_time(3, place.sweeper())
    with place.engine.connect() as conn:
        assert {kept.id for kept in list_dead_letters(conn)} == {"a", "c"}
    assert [json.loads(raw) for raw in place.redis.lrange(DEAD_LETTERS_KEY, 0, -1)] == [letters[1]]
    assert caplog.text.count("refuses a dead letter") == 1, "not at each look"
    place.pass_time(61, place.sweeper())
    assert place.redis.llen(DEAD_LETTERS_KEY) == 0


@pytest.mark.parametrize("chore", ["_keep_dead_letters", "_tell_untold", "_publish_again"])
def test_one_chore_that_fails_keeps_the_sweeper_from_no_other(
    place: Place, chore: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a fault")

    letter = {"id": "l", "queue": QUEUE, "worker_id": "w", "reason": "no JSON", "message": "{"}
    place.redis.lpush(DEAD_LETTERS_KEY, json.dumps(letter))
    *lost, suspect = place.accept(4, published=False)
    with place.engine.begin() as conn:
        conn.execute(update(Job).where(Job.id == suspect).values(deaths=SUSPECT_DEATHS))
        request_cancel(conn, [suspect])
    sweeper = place.sweeper()
    sweeper._unpublished = {"nobody": False}
    setattr(sweeper, chore, fail)
    place.pass_time(6, sweeper)
    assert "a fault" in caplog.text
    assert set(lost) <= set(place.listed())
    assert (suspect in place.listed()) == (chore != "_tell_untold")
    assert place.redis.llen(DEAD_LETTERS_KEY) == (chore == "_keep_dead_letters")
    assert bool(sweeper._unpublished) == (chore == "_publish_again")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"{}", "no properties"),
        (b'{"properties": {}}', "delivery_tag"),
        (b'{"properties": {"delivery_tag": "t"}}', "delivery_info"),
    ],
)
def test_messages_that_kombu_cannot_make_are_recognised(raw: bytes, reason: str) -> None:
    assert reason in (unreadable(raw) or "")


def test_a_message_of_ours_is_readable() -> None:
    payload = GeneratePayload.parse({"model": "echo", "prompt": "p"})
    message = build_message("j", payload)
    assert unreadable(json.dumps(message).encode()) is None
    message["properties"]["body_encoding"] = "rot13"
    assert "body_encoding" in (unreadable(json.dumps(message).encode()) or "")
    message["properties"]["body_encoding"] = "base64"
    message["body"] = "abc"
    assert "base64" in (unreadable(json.dumps(message).encode()) or "")


def test_what_is_announced_before_the_end_is_published(place: Place) -> None:
    """As the end of a suspect that a worker ran while it drained: no delivery would tell Celery of it."""
    ids = place.accept(1, published=False)
    asked: list[Callable[[], None]] = []
    inline = Inline(place.engine)

    class Later(Inline):
        """Answers when told to, as the database thread does while it commits other things."""

        def call(self, work: Callable[[SqlConnection], T]) -> Future[T]:
            future: Future[T] = Future()

            def answer() -> None:
                future.set_result(inline.call(work).result())

            asked.append(answer)
            arrived.set()
            return future

    arrived = threading.Event()
    view = QueueView(lambda: Connection(place.server.url), QUEUE)
    sweeper = Sweeper(Later(place.engine), view, "s", QUEUE)
    sweeper._tick = lambda: None  # type: ignore[method-assign]
    sweeper.start()
    sweeper.announce(ids)
    assert arrived.wait(20)
    stopper = threading.Thread(target=sweeper.stop, args=(20.0,))
    stopper.start()
    asked.pop()()
    stopper.join(20)
    assert not stopper.is_alive()
    assert place.listed() == ids
