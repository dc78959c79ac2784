"""Questions to the throughput history that the demo asks and shows; the same SQL runs on all three databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the plain SQL that answers it."""

    ask: str
    sql: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Column names and rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


QUESTIONS = (
    Question(
        "Which worker did how much, and how long did its jobs take?",
        """\
SELECT w.name AS worker, w.device, COUNT(*) AS jobs,
       SUM(r.prompt_tokens) AS prompt_tokens, SUM(r.completion_tokens) AS new_tokens,
       AVG(r.time_to_first_token_s) AS mean_ttft_s, AVG(r.latency_s) AS mean_latency_s
FROM result r
JOIN job j ON j.id = r.job_id
JOIN attempt a ON a.job_id = j.id AND a.number = j.attempt
JOIN worker w ON w.id = a.worker_id
GROUP BY w.name, w.device
ORDER BY new_tokens DESC""",
    ),
    Question(
        "When was the engine fastest, and how busy was the device then?",
        """\
SELECT s.sampled_at, s.running, s.waiting, s.generated_tokens AS new_tokens,
       s.generated_tokens / s.interval_s AS tokens_per_s, 100 * s.active_fraction AS active_percent
FROM engine_sample s
ORDER BY tokens_per_s DESC
LIMIT 5""",
    ),
    Question(
        "Which jobs took longest, and why did they end?",
        """\
SELECT j.custom_id, r.prompt_tokens, r.completion_tokens AS new_tokens, r.finish_reason,
       r.time_to_first_token_s AS ttft_s, r.latency_s
FROM result r
JOIN job j ON j.id = r.job_id
ORDER BY r.latency_s DESC
LIMIT 5""",
    ),
)


def ask(connection: Connection, question: Question) -> Answer:
    """Run the query."""
    found = connection.execute(text(question.sql))
    return Answer(tuple(found.keys()), [tuple(row) for row in found])
