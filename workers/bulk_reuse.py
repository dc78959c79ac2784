"""Nightly files that hardly change: answers of the nights before are taken over where nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection

from models_db import reuse
from models_db.jobs import job_states
from models_db.reuse import ReusedJob
from models_db.session import certain, reading
from workers.client import Client, Submission


class Reuser:
    """Submits what has no known answer, and inserts the rest as done.

    Only answers that another run would repeat are known: greedy ones, and those with a seed in their line.
    """

    def __init__(self, client: Client, now: Callable[[], datetime]) -> None:
        self._client = client
        self._now = now

    def submit(self, submissions: Sequence[Submission], days: float) -> None:
        """Accept these, with the answers that came within ``days``.

        Raises:
            TenantLimitError: none of them is in.
        """
        hashes = [submission.payload.content_hash() for submission in submissions]
        since = self._now() - timedelta(days=days)
        engine = self._client.engine()
        with reading(engine) as conn:
            known = reuse.find_answers(conn, [each for each in hashes if each is not None], since)
        pairs = list(zip(submissions, hashes, strict=True))
        self._run([pair for pair in pairs if pair[1] not in known])
        self._take_over([(submission, known[content]) for submission, content in pairs if content in known])

    def _take_over(self, lines: Sequence[tuple[Submission, str]]) -> None:
        if not lines:
            return
        jobs = self._client.new_jobs([submission for submission, _ in lines])
        reused = [ReusedJob(job, source) for job, (_, source) in zip(jobs, lines, strict=True)]
        ids = [job.id for job in jobs]

        def insert(conn: Connection, replay: bool) -> set[str]:
            return (replay and set(job_states(conn, ids))) or reuse.insert_reused(conn, reused)

        done = certain(self._client.engine(), insert)
        # Retention may have removed an answer since we looked.
        left = [line[0] for line, job in zip(lines, jobs, strict=True) if job.id not in done]
        if left:
            # These few come on top of a limit: what came with them is in already.
            self._client.submit_jobs(self._client.new_jobs(left), limited=False)

    def _run(self, lines: Sequence[tuple[Submission, str | None]]) -> None:
        handles = self._client.submit_payloads([submission for submission, _ in lines]) if lines else []
        asked = {
            content: handle.id
            for (_, content), handle in zip(lines, handles, strict=True)
            if content is not None
        }
        if asked:
            certain(self._client.engine(), lambda conn, _replay: reuse.remember(conn, asked))
