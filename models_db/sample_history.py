"""Three nights and days of a small, invented fleet, the same every time, to try queries on and to test them with.

Two models on three GPUs: people ask ``small`` by day, two nightly batches run on ``small`` and ``large``. A worker
dies in the second night, one is restarted with twice the slots before the third. Samples follow from the jobs, so
that sums agree; there is one every five minutes rather than every five seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, func, insert, select

from models_db.base import Base
from models_db.errors import InvalidValueError
from models_db.rollups import advance
from models_db.tables import (
    Attempt,
    AttemptOutcome,
    Batch,
    BatchState,
    EngineSample,
    Job,
    JobState,
    Result,
    Worker,
    WorkerState,
)

START = datetime(2026, 3, 2, 12, tzinfo=UTC)
END = datetime(2026, 3, 5, 12, tzinfo=UTC)
RESTART = datetime(2026, 3, 4, 12, tzinfo=UTC)
DEATH = datetime(2026, 3, 3, 23, 10, tzinfo=UTC)
_SAMPLE_S = 300
_CHUNK = 1000


def load(conn: Connection) -> int:
    """Insert the history into a database without one, roll-ups included; how many jobs it has.

    Raises:
        InvalidValueError: there are jobs or workers already.
    """
    for used in (Job, Worker):
        if conn.scalar(select(func.count()).select_from(used)):
            raise InvalidValueError(
                "database", f"has rows in {used.__tablename__} already", fix="Name an empty database"
            )
    world = _World()
    for table, rows in world.rows():
        for start in range(0, len(rows), _CHUNK):
            conn.execute(insert(table), rows[start : start + _CHUNK])
    while advance(conn, END + timedelta(minutes=1), longest=timedelta(days=4)):
        pass
    return len(world.jobs)


@dataclass(slots=True)
class _Incarnation:
    id: str
    name: str
    model: str
    slots: int
    start: datetime
    end: datetime | None = None
    died: bool = False
    runs: list[tuple[datetime, datetime, int, int]] = field(default_factory=list)  # from, to, prompt, new


def _scatter(number: int, below: int) -> int:
    """A number below ``below`` that looks like chance."""
    return (number * 2_654_435_761 % 2**32 >> 9) % below


def _s(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class _World:
    """Rows, as the fleet would have written them."""

    def __init__(self) -> None:
        self.small = _Incarnation("gpu-1-a", "gpu-1", "small", 32, START)
        self.large = [
            _Incarnation("gpu-2-a", "gpu-2", "large", 16, START, RESTART),
            _Incarnation("gpu-3-a", "gpu-3", "large", 16, START, DEATH, died=True),
            _Incarnation("gpu-3-b", "gpu-3", "large", 16, DEATH + _s(90)),
            _Incarnation("gpu-2-b", "gpu-2", "large", 32, RESTART + _s(60)),
        ]
        self.batches: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        for day in range(3):
            self._day(START + timedelta(days=day))
            self._reports(START + timedelta(days=day, hours=8))
            self._search(START + timedelta(days=day, hours=10))
        self._restarted()
        self._open_batch()

    def rows(self) -> Iterator[tuple[type[Base], list[dict[str, Any]]]]:
        """Every table's rows, parents first."""
        fleet = [self.small, *self.large]
        yield Worker, [self._worker(one) for one in fleet]
        yield Batch, self.batches
        yield Job, self.jobs
        yield Attempt, self.attempts
        yield Result, self.results
        yield EngineSample, [sample for one in fleet for sample in self._samples(one)]

    # ------------------------------------------------------------------------------------------------- the jobs

    def _day(self, noon: datetime) -> None:
        """People ask ``small`` from noon to eight and from eight to noon; some tire of waiting."""
        for number in range(120):
            minutes = 6 * number + (720 if number >= 80 else 0)
            created = noon + timedelta(minutes=minutes, seconds=_scatter(number, 60))
            job = self._job(f"web-{created:%m%d}-{number:03}", "small", "web", 1, created)
            if number % 57 == 11:
                self._end(job, JobState.CANCELLED, created + _s(2))
                continue
            if number % 60 == 17:
                job["deadline_at"] = created + _s(10)
                self._end(job, JobState.EXPIRED, created + _s(10))
                continue
            busy = created.hour in (12, 13)
            start = created + _s(0.02 + (_scatter(number, 40) / 10 if busy else 0))
            self._run(job, self.small, start, 0.8 + _scatter(number + 7, 30) / 10, 40, 60 + number)

    def _reports(self, evening: datetime) -> None:
        """The large batch: both GPUs of ``large`` from eight o'clock on."""
        night = f"{evening:%m%d}"
        late = evening > RESTART
        batch = self._batch(f"reports-{night}", evening, 200)
        end = evening
        for number in range(200):
            job = self._job(f"reports-{night}-{number:03}", "large", "reports", 5, evening, batch, number)
            start = evening + _s(number * (72 if late else 108))
            first = number % 3 != 0 if late else number % 2 == 0
            worker = self._at(start, "gpu-2" if first else "gpu-3")
            seconds = 60 + _scatter(number, 120)
            if worker.died and start + _s(seconds) > DEATH:
                seen = DEATH + _s(8)
                self._attempt(job, worker, start, seen, AttemptOutcome.LOST, "the worker died")
                worker.runs.append((start, DEATH, 0, 0))
                worker, start = self._at(seen, "gpu-2"), seen
            failed = number % 67 == 40
            self._run(job, worker, start, seconds, 300 + number, 500 + _scatter(number, 900), failed=failed)
            end = max(end, job["finished_at"])
        self._close(batch, end + _s(1))

    def _search(self, evening: datetime) -> None:
        """The small batch: ``small`` from ten o'clock on. In the second night three lines are cancelled."""
        night = f"{evening:%m%d}"
        batch = self._batch(f"search-{night}", evening, 120)
        end = evening
        for number in range(120):
            job = self._job(f"search-{night}-{number:03}", "small", "search", 5, evening, batch, number)
            if night == "0303" and number >= 117:
                self._end(job, JobState.CANCELLED, evening + _s(600))
                continue
            start = evening + _s(number * 30)
            self._run(job, self.small, start, 20 + _scatter(number, 40), 120, 200 + _scatter(number, 200))
            end = max(end, job["finished_at"])
        self._close(batch, end + _s(1))

    def _restarted(self) -> None:
        """A job that the restart handed back, and that ran again afterwards."""
        old, new = self.large[0], self.large[3]
        job = self._job("adhoc-0304", "large", "reports", 3, RESTART - _s(40))
        self._attempt(job, old, RESTART - _s(39), RESTART - _s(5), AttemptOutcome.RELEASED, None)
        old.runs.append((RESTART - _s(39), RESTART - _s(5), 0, 0))
        self._run(job, new, RESTART + _s(61), 45, 500, 700)

    def _open_batch(self) -> None:
        """A batch that is on its way when the history ends."""
        created = END - _s(600)
        batch = self._batch("reports-0305", created, 12)
        for number in range(12):
            job = self._job(f"reports-0305-{number:03}", "large", "reports", 5, created, batch, number)
            worker = self.large[3 if number % 2 else 2]
            if number < 5:
                self._run(job, worker, created + _s(60 * number), 90, 300, 600)
            elif number < 7:
                start = END - _s(30 + number)
                self._attempt(job, worker, start, None, None, None)
                worker.runs.append((start, END, 0, 0))
                job |= {"state": JobState.RUNNING, "owner": worker.id, "started_at": start}

    # ------------------------------------------------------------------------------------------------- the rows

    def _at(self, moment: datetime, name: str) -> _Incarnation:
        alive = [
            one
            for one in self.large
            if one.start <= moment and (one.end is None or moment < one.end) and one.name == name
        ]
        return alive[0] if alive else self._at(moment, "gpu-2")

    def _batch(self, name: str, created: datetime, total: int) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "id": name,
            "name": name,
            "state": BatchState.IN_PROGRESS,
            "total": total,
            **dict.fromkeys(("succeeded", "failed", "cancelled", "expired"), 0),
            "created_at": created,
            "finished_at": None,
        }
        self.batches.append(batch)
        return batch

    def _close(self, batch: dict[str, Any], end: datetime) -> None:
        for job in self.jobs:
            if job["batch_id"] == batch["id"]:
                batch[str(job["state"])] += 1
        batch |= {"state": BatchState.COMPLETED, "finished_at": end}

    def _job(
        self,
        job_id: str,
        model: str,
        tenant: str,
        priority: int,
        created: datetime,
        batch: dict[str, Any] | None = None,
        position: int | None = None,
    ) -> dict[str, Any]:
        job = {
            "id": job_id,
            "batch_id": batch and batch["id"],
            "position": position,
            "custom_id": None if position is None else f"line-{position + 1}",
            "tenant": tenant,
            "model": model,
            "queue": f"tokenmill.{model}",
            "priority": priority,
            "state": JobState.QUEUED,
            "attempt": 0,
            "owner": None,
            "cancel_requested": False,
            "created_at": created,
            "published_at": created,
            "started_at": None,
            "finished_at": None,
            "deadline_at": None,
            "error_type": None,
            "error_message": None,
            "params": {"max_tokens": 1500},
            "prompt": {"prompt": f"sample {job_id}"},
        }
        self.jobs.append(job)
        return job

    def _attempt(
        self,
        job: dict[str, Any],
        worker: _Incarnation,
        start: datetime,
        end: datetime | None,
        outcome: AttemptOutcome | None,
        error: str | None,
    ) -> None:
        job["attempt"] += 1
        self.attempts.append(
            {
                "job_id": job["id"],
                "number": job["attempt"],
                "worker_id": worker.id,
                "started_at": start,
                "ended_at": end,
                "outcome": outcome,
                "error": error,
            }
        )

    def _run(
        self,
        job: dict[str, Any],
        worker: _Incarnation,
        start: datetime,
        seconds: float,
        prompt_tokens: int,
        new_tokens: int,
        *,
        failed: bool = False,
    ) -> None:
        end = start + _s(seconds)
        job["started_at"] = start
        if failed:
            end = start + _s(1)
            error = "the prompt is longer than the model's context"
            self._attempt(job, worker, start, end, AttemptOutcome.FAILED, error)
            job |= {"error_type": "context_exceeded", "error_message": error}
            self._end(job, JobState.FAILED, end)
            return
        self._attempt(job, worker, start, end, AttemptOutcome.SUCCEEDED, None)
        self._end(job, JobState.SUCCEEDED, end)
        worker.runs.append((start, end, prompt_tokens, new_tokens))
        self.results.append(
            {
                "job_id": job["id"],
                "choice": 0,
                "finish_reason": "stop" if new_tokens % 3 else "length",
                "prompt_tokens": prompt_tokens,
                "completion_tokens": new_tokens,
                "cached_tokens": prompt_tokens // 4,
                "queue_time_s": 0.01,
                "time_to_first_token_s": 0.05 + prompt_tokens / 4000,
                "latency_s": float(seconds),
                "created_at": end,
                "text": "A sample answer.",
            }
        )

    def _end(self, job: dict[str, Any], state: JobState, end: datetime) -> None:
        job |= {"state": state, "finished_at": end, "cancel_requested": state is JobState.CANCELLED}

    def _worker(self, one: _Incarnation) -> dict[str, Any]:
        state = WorkerState.ONLINE if one.end is None else WorkerState.STOPPED
        return {
            "id": one.id,
            "name": one.name,
            "host": f"node-{one.name[-1]}",
            "pid": 4000,
            "version": "0.1.0",
            "backend": "async",
            "device": "cuda:0",
            "model": one.model,
            "dtype": "bfloat16",
            "slots": one.slots,
            "state": WorkerState.DEAD if one.died else state,
            "heartbeat": 1,
            "started_at": one.start,
            "heartbeat_at": one.end or END,
            "stopped_at": one.end,
            "config": {"max_num_seqs": one.slots, "block_size": 16},
        }

    def _samples(self, one: _Incarnation) -> Iterator[dict[str, Any]]:
        # Five seconds before a boundary, so that an hour's last sample lies within the hour.
        begin = START - _s(5)
        while (end := begin + _s(_SAMPLE_S)) <= END:
            if one.start - _s(5) <= begin and (one.end is None or end <= one.end):
                yield self._sample(one, begin, end)
            begin = end

    def _sample(self, one: _Incarnation, begin: datetime, end: datetime) -> dict[str, Any]:
        ended = [run for run in one.runs if begin < run[1] <= end]
        spans = [
            (max(run[0], begin), min(run[1], end)) for run in one.runs if run[0] < end and run[1] > begin
        ]
        worked = sum((span[1] - span[0]).total_seconds() for span in spans)
        running = sum(1 for run in one.runs if run[0] <= end < run[1])
        waiting = sum(
            1
            for job in self.jobs
            if job["model"] == one.model
            and job["created_at"] <= end < (job["started_at"] or job["finished_at"] or END)
        )
        new_tokens = sum(run[3] for run in ended)
        busy = min(0.98 * _SAMPLE_S, 0.45 * worked)
        return {
            "worker_id": one.id,
            "sampled_at": end,
            "interval_s": float(_SAMPLE_S),
            "running": running,
            "waiting": min(waiting, 40),  # what a worker holds beyond its slots is bounded
            "prompt_tokens": sum(run[2] for run in ended),
            "cached_tokens": sum(run[2] // 4 for run in ended),
            "generated_tokens": new_tokens,
            "steps": new_tokens,
            "requests_finished": len(ended),
            "requests_failed": 0,
            "preemptions": 1 if running > 3 else 0,
            "busy_s": busy,
            "prepare_s": new_tokens * 0.0002,
            "active_fraction": busy / _SAMPLE_S,
            "kv_used_fraction": min(0.95, running * 0.11),
        }
