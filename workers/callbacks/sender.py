"""Sends what is due: takes callbacks from SQL, posts them, and writes down what came of it.

Any number of senders may run. Each takes a callback for the length of a lease; one that dies in between leaves it to
the others, who send it again under the same id. So a receiver hears of every end at least once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

from sqlalchemy import Connection, Engine

from backend.api import RequestError
from models_db.callback_ends import BatchEnd, JobEnd, batch_ends, job_ends
from models_db.callbacks import (
    SCHEMES,
    DueCallback,
    claim_due,
    database_now,
    due_hosts,
    overdue,
    record_delivered,
    record_failed,
    record_retry,
)
from models_db.faults import summary
from models_db.session import reading, transaction
from workers.callbacks.batch_ends import BatchEnder
from workers.callbacks.body import event_of
from workers.callbacks.pauses import Pause
from workers.callbacks.schedule import Answer, Decision, Verdict, decide
from workers.callbacks.secret_book import SecretBook
from workers.callbacks.signing import signed_headers
from workers.callbacks.urls import CallbackRules, CallbackUrl, check_callback_url

log = logging.getLogger("tokenmill.callbacks")

POLL_S = 1.0
NEXT_HOSTS_S = 0.05  # when a look did not come to the end of the hosts
AWAY_S = 5.0  # between two looks while the database does not answer
LOOK_S = 10.0  # then a look sends what it has taken: the leases run, and the database may be slow
_MOST_NAMED = 1000  # hosts that are left to others, each named in the log once
_MOST_PAUSES = 10_000  # of hosts, before those that are over are dropped
_LONGEST_HOST_PAUSE_S = 60.0
_FIRST_HOST_PAUSE_S = 0.5


class Posts(Protocol):
    """Sends one request; see ``workers.callbacks.posting.Poster``."""

    async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer: ...


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """How much at once, and for how long."""

    per_host: int = 8  # requests to one host at once
    in_all: int = 64  # shared by the hosts, those with the fewest first
    timeout_s: float = 10.0  # of a request
    max_age_s: float = 86_400.0  # after the end that is told
    grace_s: float = 5.0  # for requests that are under way when the sender stops

    @property
    def lease(self) -> timedelta:
        """Longer than the rest of the look, a request, and the note of what came of it can take."""
        return timedelta(seconds=2 * self.timeout_s + 30)


@dataclass(slots=True)
class Counts:
    """What a sender has done so far."""

    delivered: int = 0
    postponed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Reach:
    """Which of a host's callbacks this sender's settings let it send, and why not the others."""

    schemes: tuple[str, ...]
    refused: Mapping[str, str]  # by scheme


@dataclass(slots=True)
class _Taken:
    claim: DueCallback
    end: JobEnd | BatchEnd | None


@dataclass(slots=True)
class _Look:
    taken: list[_Taken] = field(default_factory=list)
    more: bool = False  # there may be more than we had hands for
    full: bool = False  # there was no hand at all, so that nobody was looked for


class CallbackSender:
    """See the module.

    Args:
        secrets: entries of ``SecretBook``; each that is for a message's host signs it.
        clock: seconds since 1970, for the time in the signature.
        monotonic: seconds, for pauses.
        spread: chance, for pauses and for which host to begin with.
    """

    def __init__(
        self,
        engine: Engine,
        rules: CallbackRules,
        secrets: Sequence[str],
        poster: Posts,
        limits: SenderLimits | None = None,
        *,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        spread: random.Random | None = None,
    ) -> None:
        self.counts = Counts()
        self._engine = engine
        self._rules = rules
        self._secrets = SecretBook.parse(secrets)
        self._poster = poster
        self._limits = limits or SenderLimits()
        self._poll_s = poll_s
        self._clock = clock
        self._monotonic = monotonic
        self._spread = spread or random.Random()
        self._busy: Counter[str] = Counter()
        self._batches = BatchEnder(engine, lambda: self._monotonic())
        self._pauses: dict[str, Pause] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._after = ""
        self._named: set[str] = set()
        self._fault = ""

    async def run(self, stop: asyncio.Event, *, away_s: float = AWAY_S) -> None:
        """Send until ``stop`` is set; then what is due by now, for a little time.

        A worker's last jobs have ended just before, and this host may be the only one that sends.
        """
        while not stop.is_set():
            self._freed.clear()
            wake = [stop]
            pause_s = self._poll_s
            try:
                look = await asyncio.to_thread(self._look)
            except Exception as exc:  # a sender has no reason to die that others would not have as well
                self._note_fault(exc)
                pause_s = away_s
            else:
                self._note_fault(None)
                for taken in look.taken:
                    self._start(taken)
                if look.more:
                    wake.append(self._freed)
                if self._after and not look.full:
                    pause_s = NEXT_HOSTS_S
            await _first(wake, pause_s)
        with suppress(Exception):  # the others, or the next start
            for taken in (await asyncio.to_thread(self._look)).taken:
                self._start(taken)
        await self._drain()

    async def send_due(self) -> None:
        """Send what is due now, and return when it is sent."""
        while True:
            look = await asyncio.to_thread(self._look)
            for taken in look.taken:
                self._start(taken)
            if self._tasks:
                await asyncio.wait(self._tasks)
            if not look.taken and not self._after:
                return

    # ------------------------------------------------------------------------------------- in a thread: the database

    def _look(self) -> _Look:
        """Take what there are hands for, a share for each host."""
        self._batches.look()
        look = _Look()
        free = self._limits.in_all - self._busy.total()
        if free <= 0:  # the turn stays with those who come next
            look.more = look.full = True
            return look
        with reading(self._engine) as conn:
            hosts, self._after = due_hosts(conn, database_now(conn), after=self._after)
        # Each hand that gets free goes to a host that holds few, or those who answer slowly would share all of them.
        self._spread.shuffle(hosts)
        hosts.sort(key=lambda host: self._busy[host])
        began: datetime | None = None
        for host in hosts:
            reach = self._reach(host)
            room = min(self._limits.per_host - self._busy[host], free)
            try:
                if not reach.schemes:
                    self._leave(host, reach)
                elif self._paused(host):
                    continue
                elif room <= 0:
                    look.more = True
                else:
                    # What was taken before is leased: no second try lets that time pass.
                    tries = 1 if look.taken else 3
                    taken, now = transaction(
                        self._engine, partial(self._take, host=host, limit=room, reach=reach), tries=tries
                    )
                    look.taken += taken
                    look.more |= bool(taken)
                    free -= len(taken)
                    if reach.refused and len(taken) < room:
                        self._leave(host, reach)
                    began = began or now
                    if (now - began).total_seconds() >= LOOK_S:
                        look.more = True
                        return look
            except Exception:
                if look.taken:
                    return look  # they are leased to us: send them, and meet the trouble at the next look
                raise
        return look

    def _reach(self, host: str) -> _Reach:
        refused = {}
        for scheme in SCHEMES:
            try:
                self._allowed(f"{scheme}://{host}/")
            except RequestError as exc:
                refused[scheme] = str(exc)
        return _Reach(tuple(scheme for scheme in SCHEMES if scheme not in refused), refused)

    def _allowed(self, text: str) -> tuple[CallbackUrl, list[str]]:
        """The URL and what signs a callback to it.

        Raises:
            RequestError: this sender's settings do not let it be told.
        """
        url = check_callback_url(text, self._rules)
        secrets = self._secrets.of(url)
        if not secrets:
            raise RequestError(
                f"nothing signs what goes to {url.netloc}",
                field="callback_secrets",
                fix="Add a secret for it, or one for all hosts",
            )
        return url, secrets

    def _leave(self, host: str, reach: _Reach) -> None:
        """Leave callbacks to senders whose settings allow what ours do not; end those that had none for too long."""
        max_age = timedelta(seconds=self._limits.max_age_s)
        with reading(self._engine) as conn:
            now = database_now(conn)
            old = overdue(conn, host, now, now - max_age)
        refused = [(claim, why) for claim in old if (why := reach.refused.get(_scheme(claim.url)))]

        def end(conn: Connection) -> list[tuple[DueCallback, str]]:
            return [(claim, why) for claim, why in refused if record_failed(conn, claim, why)]

        if not reach.schemes and host not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(host)
            why = next(iter(reach.refused.values()))
            log.warning("what %s is to be told is left to other senders: %s", host, why)
        for claim, why in transaction(self._engine, end) if refused else ():
            self._note(claim, host, Answer(error=why, refused=True), Decision(Verdict.GIVE_UP))

    def _take(self, conn: Connection, host: str, limit: int, reach: _Reach) -> tuple[list[_Taken], datetime]:
        now = database_now(conn)
        claims = claim_due(conn, host, limit, now, self._limits.lease, reach.schemes)
        jobs = job_ends(conn, [claim.job_id for claim in claims if claim.job_id is not None])
        batches = batch_ends(conn, [claim.batch_id for claim in claims if claim.batch_id is not None])
        ends: dict[str | None, JobEnd | BatchEnd] = {}
        ends.update(jobs)
        ends.update(batches)
        return [_Taken(claim, ends.get(claim.job_id or claim.batch_id)) for claim in claims], now

    def _record(self, claim: DueCallback, answer: Answer) -> Decision:
        def write(conn: Connection) -> Decision:
            now = database_now(conn)
            age_s = (now - claim.ended_at).total_seconds()
            decision = decide(
                answer,
                claim.tries,
                age_s,
                self._limits.max_age_s,
                self._spread.uniform,
                unwanted=claim.unwanted,
            )
            match decision.verdict:
                case Verdict.DELIVERED:
                    record_delivered(conn, claim)
                case Verdict.RETRY:
                    due_at = now + timedelta(seconds=decision.pause_s)
                    record_retry(conn, claim, answer.text, due_at, unwanted=answer.unwanted)
                case Verdict.GIVE_UP:
                    record_failed(conn, claim, answer.text)
            return decision

        return transaction(self._engine, write)

    # --------------------------------------------------------------------------------------------- on the event loop

    def _start(self, taken: _Taken) -> None:
        host = taken.claim.host
        self._busy[host] += 1
        task = asyncio.create_task(self._deliver(taken))
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._busy[host] -= 1
            if not self._busy[host]:
                del self._busy[host]
            self._freed.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("callback %s: %s; it is sent again", taken.claim.message_id, summary(error))

        task.add_done_callback(done)

    async def _deliver(self, taken: _Taken) -> None:
        claim = taken.claim
        if taken.end is None:
            return  # its job runs again; the next end makes it due
        where = claim.host
        try:
            url, secrets = self._allowed(claim.url)
        except RequestError as exc:
            answer = Answer(error=str(exc), refused=True)
        else:
            where = url.origin
            try:
                body = event_of(claim.message_id, taken.end, include_output=claim.include_output)
                headers = signed_headers(secrets, claim.message_id, int(self._clock()), body)
                answer = await self._poster.post(url, headers, body)
            except Exception as exc:  # or it would be taken again with each lease, for ever
                log.exception("fault while telling %s (%s)", where, claim.message_id)
                answer = Answer(error=f"{type(exc).__name__} in the sender, see its log")
        self._note_host(claim.host, answer)
        decision = await asyncio.to_thread(self._record, claim, answer)
        self._note(claim, where, answer, decision)

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.grace_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    # ------------------------------------------------------------------------------------------------------ internals

    def _paused(self, host: str) -> bool:
        pause = self._pauses.get(host)
        return pause is not None and self._monotonic() < pause.until

    def _note_host(self, host: str, answer: Answer) -> None:
        trouble = answer.status is None or answer.status >= 500 or answer.status == 429
        if not trouble or answer.refused:
            self._pauses.pop(host, None)
            return
        if self._paused(host):
            return  # of the same volley
        if len(self._pauses) >= _MOST_PAUSES:  # hosts that were never heard of again
            self._pauses = {each: it for each, it in self._pauses.items() if self._monotonic() < it.until}
        pause = self._pauses.setdefault(host, Pause())
        asked_s = answer.retry_after_s or 0.0
        pause.lengthen(self._monotonic(), _FIRST_HOST_PAUSE_S, _LONGEST_HOST_PAUSE_S, asked_s)

    def _note(self, claim: DueCallback, where: str, answer: Answer, decision: Decision) -> None:
        about = f"job {claim.job_id}" if claim.job_id is not None else f"batch {claim.batch_id}"
        match decision.verdict:
            case Verdict.DELIVERED:
                self.counts.delivered += 1
                log.debug("told %s of %s (%s)", where, about, claim.message_id)
            case Verdict.RETRY:
                self.counts.postponed += 1
                log.warning(
                    "%s was not told of %s (%s): %s; try %d follows in %.0f s",
                    where, about, claim.message_id, answer.text, claim.tries + 1, decision.pause_s,
                )  # fmt: skip
            case Verdict.GIVE_UP:
                self.counts.failed += 1
                log.error(
                    "%s is not told of %s (%s) any more, after %d tries: %s. Once it is mended: "
                    "tokenmill callbacks retry %s",
                    where, about, claim.message_id, claim.tries, answer.text, claim.id,
                )  # fmt: skip

    def _note_fault(self, error: Exception | None) -> None:
        text = "" if error is None else summary(error)
        if text == self._fault:
            return
        self._fault = text
        if error is None:
            log.warning("callbacks are sent again")
        else:
            log.error("no callbacks are sent until this is mended: %s", text)


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


async def _first(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Wait for one of them, or for the time."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
