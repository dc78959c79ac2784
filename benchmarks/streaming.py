"""How long a token takes to a client, through Redis, on one machine.

    python -m benchmarks.streaming                       64 streams of 30 tokens a second, half a minute
    python -m benchmarks.streaming --streams 256

Once through a real worker: a worker process with the echo backend, whose tokens carry the moment at which they were
handed over, and this process as the client, which submits the jobs and reads all streams by the machine's same clock.
What counts is handed over while all streams run. Once without the worker around it: the worker's stream writer fed by
a thread, and one client, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from backend.api import GenerationHandle, GenerationRequest, Prompt, TokenChunk
from benchmarks import report
from benchmarks.worker_process import start_process
from models_db import migrate
from workers.broker import async_stream_connection, stream_connection
from workers.client import AsyncClient
from workers.client.streaming import read_stream_async
from workers.private_redis import PrivateRedis
from workers.settings import Settings, load_settings
from workers.stream_writer import StreamWriter
from workers.streams import StreamEnd

LONGEST_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Delays:
    """From a chunk's hand-over to its receipt."""

    chunks: int
    median_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Delays:
        """Percentiles by nearest rank.

        Raises:
            RuntimeError: nothing was measured.
        """
        if not seconds:
            raise RuntimeError("no token was handed over while all streams ran. Raise --seconds")
        ordered = sorted(seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return cls(len(ordered), 1e3 * statistics.median(ordered), 1e3 * p99, 1e3 * ordered[-1])


# ------------------------------------------------------------------------------------------- through a worker


def through_worker(streams: int, tokens_per_s: float, seconds: float) -> Delays:
    """Jobs of a real worker process, read by this process."""
    with tempfile.TemporaryDirectory() as name, PrivateRedis(Path(name)) as server:
        folder = Path(name)
        settings = load_settings(
            broker_url=server.url,
            database_url=f"sqlite:///{folder / 'tokenmill.db'}",
            backend="benchmarks.stamped_echo:create_backend",
            model="echo",
        )
        migrate.upgrade(settings.database_url)
        variables = {
            "TOKENMILL_BROKER_URL": settings.broker_url,
            "TOKENMILL_DATABASE_URL": settings.database_url,
            "TOKENMILL_BACKEND": settings.backend,
            "TOKENMILL_MODEL": settings.model,
            "TOKENMILL_LOG_LEVEL": "warning",
            "TOKENMILL_ENGINE__MAX_NUM_SEQS": str(streams),
            "TOKENMILL_ENGINE__MAX_NUM_BATCHED_TOKENS": str(max(512, streams)),
            "TOKENMILL_ENGINE__ECHO_TOKENS_PER_S": str(tokens_per_s),
        }
        with start_process(
            ["-m", "workers.cli", "worker", "--once"], variables, folder / "worker.log"
        ) as worker:
            try:
                received = asyncio.run(_jobs(settings, streams, round(seconds * tokens_per_s)))
            except TimeoutError:
                worker.check()
                raise
    begun = max(moments[0][0] for moments in received)
    ended = min(moments[-1][0] for moments in received)
    return Delays.of(
        [
            (seen - handed) / 1e9
            for moments in received
            for handed, seen in moments
            if begun <= handed <= ended
        ]
    )


async def _jobs(settings: Settings, streams: int, tokens: int) -> list[list[tuple[int, int]]]:
    """For each stream the moments of hand-over and receipt of its chunks, in ns. A first job waits for the worker."""

    async def one(max_tokens: int) -> list[tuple[int, int]]:
        job = await client.submit("a word and another", max_tokens=max_tokens, stream=True)
        moments = []
        async for event in job.stream():
            seen = time.monotonic_ns()
            moments += [(int(handed), seen) for handed in event.text.split()]
        return moments

    async with AsyncClient(settings) as client:
        await asyncio.wait_for(one(1), LONGEST_START_S)
        return await asyncio.gather(*(one(tokens) for _ in range(streams)))


# ------------------------------------------------------------------------------------------- the writer alone


def writer_alone(streams: int, tokens_per_s: float, seconds: float) -> Delays:
    """The stream writer and a client in this process."""
    settings = Settings()
    with tempfile.TemporaryDirectory() as folder, PrivateRedis(Path(folder)) as server:
        writer = StreamWriter(
            stream_connection(server.url),
            interval_s=settings.stream_interval_s,
            expires_s=60,
            max_entries=settings.stream_max_entries,
        )
        writer.start()
        handles = {f"job-{number}": _handle(f"job-{number}") for number in range(streams)}
        for job_id, handle in handles.items():
            writer.begin(job_id, 1, handle)
        feeder = threading.Thread(target=_feed, args=(writer, handles, tokens_per_s, seconds))
        delays = asyncio.run(_read_all(server.url, list(handles), feeder))
        writer.stop(5)
    return Delays.of(delays)


def _handle(job_id: str) -> GenerationHandle:
    return GenerationHandle(
        GenerationRequest(request_id=job_id, prompt=Prompt(prompt="x"), stream=True), lambda: None
    )


def _feed(
    writer: StreamWriter, handles: dict[str, GenerationHandle], tokens_per_s: float, seconds: float
) -> None:
    """Hand a token to every stream at the same moments, as an engine's steps do."""
    began = time.perf_counter()
    for step in range(int(seconds * tokens_per_s)):
        time.sleep(max(0.0, began + step / tokens_per_s - time.perf_counter()))
        for handle in handles.values():
            handle.push(TokenChunk(f"{time.perf_counter()} ", (step,)))
    for job_id in handles:
        writer.end(job_id, 1, StreamEnd("succeeded"))


async def _read_all(url: str, job_ids: list[str], feeder: threading.Thread) -> list[float]:
    connection = async_stream_connection(url)
    delays: list[float] = []

    async def nothing() -> None:
        return None

    async def read(job_id: str) -> None:
        async for event in read_stream_async(connection, job_id, nothing, url=url):
            now = time.perf_counter()
            delays.extend(now - float(moment) for moment in event.text.split())

    tasks = [asyncio.create_task(read(job_id)) for job_id in job_ids]
    await asyncio.sleep(0.2)
    feeder.start()
    await asyncio.gather(*tasks)
    await connection.aclose()
    return delays


# ------------------------------------------------------------------------------------------------------- main


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.streaming",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    work = (options.streams, options.tokens_per_s, options.seconds)
    found = {
        "a worker process to a client": through_worker(*work),
        "the writer alone, in one process": writer_alone(*work),
    }
    table = Table(
        title=f"hand-over of a token to its receipt, {options.streams} streams of "
        f"{options.tokens_per_s:g} tokens/s, gathered for {1e3 * Settings().stream_interval_s:g} ms"
    )
    for column in ("through", "chunks", "median", "p99", "worst"):
        table.add_column(column, justify="left" if column == "through" else "right")
    for name, one in found.items():
        times = (f"{value:.1f} ms" for value in (one.median_ms, one.p99_ms, one.worst_ms))
        table.add_row(name, f"{one.chunks:,}", *times)
    command = " ".join(
        ["python -m benchmarks.streaming", *(sys.argv[1:] if arguments is None else arguments)]
    )
    report.keep(
        "streaming",
        command,
        [table],
        {"streams": options.streams, "delays": {name: asdict(one) for name, one in found.items()}},
        options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
