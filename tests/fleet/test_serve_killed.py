"""Servers of the doorway that are killed in the middle of a batch, under load: the next one goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from sqlalchemy import func, select

from models_db.batches import open_jobs
from models_db.tables import BatchState, Job
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import Fleet, wait_until
from tests.servers import free_port

LINES = 3000
BAD = {7, 1500}  # lines that are no request
PATIENCE_S = 120.0


@contextmanager
def served(fleet: Fleet, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    """``tokenmill serve`` as a process of its own, and a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "workers.cli", "serve", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=os.environ | fleet.environment(), stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(url, process, log), PATIENCE_S, "the server to answer")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(20)


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        assert process.poll() is None, log.read_text()
        return False


def line(number: int) -> str:
    if number in BAD:
        return json.dumps({"custom_id": f"q{number}", "method": "GET"})
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": f"word{number} and on"}],
        "max_tokens": 3,
    }
    return json.dumps(
        {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


def inserted(fleet: Fleet) -> int:
    with fleet.engine.connect() as conn:
        return conn.scalar(select(func.count()).where(Job.batch_id.is_not(None))) or 0


def ask(client: openai.OpenAI, number: int) -> str:
    """A person who asks meanwhile."""
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": f"person{number} asks"}],
        max_tokens=2,
        temperature=0,
        timeout=PATIENCE_S,
    )
    return str(answer.choices[0].message.content)


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def test_a_batch_outlives_the_servers_that_are_killed_while_they_feed_and_watch_it(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet = make_fleet(engine={"echo_tokens_per_s": 20})
    fleet.worker()
    rows = "\n".join(line(number) for number in range(LINES)).encode()
    with ExitStack() as stack:
        first, client = stack.enter_context(served(fleet, tmp_path / "first.log"))
        file = client.files.create(file=("in.jsonl", rows), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        wait_until(lambda: inserted(fleet) > 0, PATIENCE_S, "the first lines")
        first.kill()
        assert 0 < inserted(fleet) < LINES, "it was killed in the middle of feeding"

        second, client = stack.enter_context(served(fleet, tmp_path / "second.log"))
        people = stack.enter_context(ThreadPoolExecutor(4))
        asked = list(people.map(lambda number: ask(client, number), range(20)))
        assert asked == [f"person{number} asks" for number in range(20)], "people are served meanwhile"

        def fed() -> int | None:
            with fleet.engine.connect() as conn:
                state, unended = open_jobs(conn, batch_id.removeprefix("batch_"), 1)
            return unended if state is BatchState.IN_PROGRESS else None

        still_open = wait_until(fed, PATIENCE_S, "the second server to feed the rest")
        second.kill()
        assert still_open, "it was killed while jobs were waiting"

        _, client = stack.enter_context(served(fleet, tmp_path / "third.log"))
        wait_until(
            lambda: client.batches.retrieve(batch_id).status == "completed", PATIENCE_S, "the third to end it"
        )
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (LINES, LINES - len(BAD), len(BAD))
        answers, failures = read(client, batch.output_file_id), read(client, batch.error_file_id)
        assert [row["custom_id"] for row in answers] == [f"q{n}" for n in range(LINES) if n not in BAD]
        assert [row["custom_id"] for row in failures] == [f"q{n}" for n in sorted(BAD)]
        for row in answers:
            text = row["response"]["body"]["choices"][0]["message"]["content"]
            assert text == f"word{row['custom_id'][1:]} and on", "an answer is its own line's"
        assert Counter(each.purpose for each in client.files.list()) == {"batch": 1, "batch_output": 2}
    with fleet.engine.connect() as conn:
        twice = select(Job.custom_id).where(Job.batch_id.is_not(None)).group_by(Job.custom_id)
        assert conn.scalars(twice.having(func.count() > 1)).all() == []
