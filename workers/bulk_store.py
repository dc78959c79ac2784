"""How lines of a bulk run become rows: jobs, or lines that have ended before they began; in pieces that fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from itertools import groupby

from sqlalchemy import Connection

from backend.api import RequestError, check_text
from models_db import batches
from models_db.batches import EndedLine
from models_db.errors import TenantLimitError
from models_db.session import certain
from models_db.tables import JobState
from workers.bulk_input import BulkLine, LineError
from workers.bulk_reuse import Reuser
from workers.callbacks.wanted import wanted_callback
from workers.client import Client, Submission
from workers.payload import queue_for

_LONGEST_ID = 255  # characters of a custom id


class LineStore:
    """Puts the lines of one batch into the database, and its jobs on their queues.

    Args:
        deadline_at: when what has not ended expires, lines that come later at once.
        reuse_days: answers to unchanged lines that came within so many days are taken over.
    """

    def __init__(
        self,
        client: Client,
        batch_id: str,
        *,
        now: Callable[[], datetime],
        deadline_at: datetime | None,
        reuse_days: float | None,
    ) -> None:
        self._client = client
        self._batch_id = batch_id
        self._now = now
        self._deadline_at = deadline_at
        self._reuse_days = reuse_days
        self._reuser = Reuser(client, now)

    def steps(self, chunk: Sequence[BulkLine | LineError]) -> list[Callable[[], object]]:
        """What is to be done with the lines: bad ones have ended, the others are jobs or come too late."""
        steps: list[Callable[[], object]] = []
        for kind, group in groupby(chunk, type):
            if kind is LineError:
                bad = [_bad_line(row) for row in group if isinstance(row, LineError)]
                steps.append(partial(self._insert_ended, bad))
            else:
                good = [row for row in group if isinstance(row, BulkLine)]
                steps.append(Accepting(good, self._accept))
        return steps

    def _accept(self, lines: Sequence[BulkLine]) -> None:
        """Make jobs of the lines, as of now: they may have waited long for their tenant.

        Raises:
            TenantLimitError: none of them is in.
        """
        left = None if self._deadline_at is None else (self._deadline_at - self._now()).total_seconds()
        if left is not None and left <= 0:
            self._insert_ended([self._late_line(line) for line in lines])
            return
        submissions = [_submission(self._batch_id, line, left) for line in lines]
        if self._reuse_days is None:
            self._client.submit_payloads(submissions)
        else:
            self._reuser.submit(submissions, self._reuse_days)

    def _late_line(self, line: BulkLine) -> EndedLine:
        message = "the batch's deadline passed before the line was submitted"
        return EndedLine(
            line.line,
            line.custom_id,
            JobState.EXPIRED,
            "expired",
            message,
            callback=wanted_callback(line.payload, self._client.settings),
            tenant=line.payload.tenant,
        )

    def _insert_ended(self, lines: Sequence[EndedLine]) -> None:
        model = self._client.settings.model

        def insert(conn: Connection, _replay: bool) -> None:
            batches.insert_ended_lines(conn, self._batch_id, lines, model=model, queue=queue_for(model))

        certain(self._client.engine(), insert)


class Storing:
    """The steps of one chunk, taken in a thread beside; after an error, ``again`` goes on at the step that failed."""

    def __init__(self, beside: ThreadPoolExecutor, steps: Iterable[Callable[[], object]]) -> None:
        self._beside = beside
        self._left = deque(steps)
        self.again()

    @property
    def lines(self) -> int:
        """Good lines that are not in yet; exact while no step is being taken."""
        return sum(len(step.left) for step in self._left if isinstance(step, Accepting))

    def again(self) -> None:
        """Go on at the step that failed, or begin."""
        self._future = self._beside.submit(self._take)

    def result(self) -> None:
        """Wait for the last step; raises what one of them raised."""
        self._future.result()

    def _take(self) -> None:
        while self._left:
            self._left[0]()
            self._left.popleft()


class Accepting:
    """Accepts lines and takes them off ``left``, in pieces where a tenant has room for some only.

    A call raises ``TenantLimitError`` when there is no room for the next one; another call goes on from there.
    """

    def __init__(self, lines: list[BulkLine], accept: Callable[[Sequence[BulkLine]], object]) -> None:
        self.left = lines
        self._accept = accept

    def __call__(self) -> None:
        size = len(self.left)
        while self.left:
            size = min(size, len(self.left))
            try:
                self._accept(self.left[:size])
            except TenantLimitError as error:
                room = error.limit - error.present
                if size == 1 or room <= 0:
                    raise
                # So many jobs fit, whoever's they are; of tokens, lines may want very different numbers.
                fits = room if error.what == "jobs" else min(size // 2, size * room // error.wanted)
                size = max(1, min(size - 1, fits))
            else:
                del self.left[:size]


def _submission(batch_id: str, line: BulkLine, left_s: float | None) -> Submission:
    payload = line.payload
    if left_s is not None:
        limits = [limit for limit in (payload.deadline_s, left_s) if limit is not None]
        payload = payload.model_copy(update={"deadline_s": min(limits)})
    return Submission(payload, batch_id=batch_id, position=line.line)


def _bad_line(error: LineError) -> EndedLine:
    return EndedLine(error.line, _storable(error.custom_id), JobState.FAILED, error.code, error.message)


def _storable(text: str | None) -> str | None:
    """The text, where a database takes it as it is."""
    if not text or len(text) > _LONGEST_ID:
        return None
    try:
        return check_text(text, "custom_id")
    except RequestError:
        return None
