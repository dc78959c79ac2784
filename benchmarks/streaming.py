"""How long a token takes from the engine's thread to a client, through Redis, on one machine.

    python -m benchmarks.streaming                       64 streams of 30 tokens a second
    python -m benchmarks.streaming --streams 256

A private Redis, the worker's stream writer, and one asyncio client that reads all streams. Every chunk carries the
time at which it was handed over, so nothing is estimated.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path

from backend.api import GenerationHandle, GenerationRequest, Prompt, TokenChunk
from workers.broker import async_stream_connection, stream_connection
from workers.client.streaming import read_stream_async
from workers.private_redis import PrivateRedis
from workers.settings import Settings
from workers.stream_writer import StreamWriter
from workers.streams import StreamEnd


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    settings = Settings()
    with tempfile.TemporaryDirectory() as folder, PrivateRedis(Path(folder)) as server:
        writer = StreamWriter(
            stream_connection(server.url),
            interval_s=settings.stream_interval_s,
            expires_s=60,
            max_entries=settings.stream_max_entries,
        )
        writer.start()
        handles = {f"job-{number}": _handle(f"job-{number}") for number in range(arguments.streams)}
        for job_id, handle in handles.items():
            writer.begin(job_id, 1, handle)
        feeder = threading.Thread(
            target=_feed, args=(writer, handles, arguments.tokens_per_s, arguments.seconds)
        )
        delays = asyncio.run(_read_all(server.url, list(handles), feeder))
        writer.stop(5)
    delays.sort()
    print(
        f"{arguments.streams} streams, {arguments.tokens_per_s:g} tokens/s each: {len(delays)} chunks, "
        f"median {1e3 * statistics.median(delays):.1f} ms, p99 {1e3 * delays[int(0.99 * len(delays))]:.1f} ms, "
        f"worst {1e3 * delays[-1]:.1f} ms"
    )


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


if __name__ == "__main__":
    main()
