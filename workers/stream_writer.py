"""Writes token streams to Redis: a thread of the worker, so that no engine ever waits for a network.

Text is gathered for some milliseconds and goes out for all streams in one round trip. When Redis is away, text waits
here up to a limit; what is beyond it is dropped from the stream, whose readers see the jump and take the answer
from SQL when the job has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from backend.api import GenerationHandle, TokenChunk
from workers.redaction import redact_text
from workers.streams import StreamEnd, end_fields, restart_fields, stream_key, text_fields

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MOST_WAITING_CHARS = 16 * 2**20


@dataclass(slots=True, eq=False)
class _Stream:
    """One attempt's stream, with what the thread has not taken yet."""

    job_id: str
    attempt: int
    offset: int = 0  # characters that came from the backend
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    begins: bool = True
    end: StreamEnd | None = None
    lives_until: float = float("-inf")  # by our clock, as far as Redis was told

    def take(self) -> list[dict[str, str]]:
        """The entries to write now."""
        entries = [restart_fields(self.attempt)] if self.begins else []
        text = "".join(self.text)
        if text or self.tokens:
            entries.append(text_fields(self.attempt, self.offset - len(text), text, self.tokens))
        if self.end is not None:
            entries.append(end_fields(self.attempt, self.offset, self.end))
        self.begins, self.tokens = False, 0
        self.text.clear()
        return entries


class StreamWriter:
    """See the module. ``begin`` and ``end`` are called by the worker; chunks come from the backend's thread.

    Args:
        connection: used by this thread alone, and closed by ``stop``.
        interval_s: text is gathered for so long.
        expires_s: lifetime of a stream after its last entry; a stream lives at least three quarters of it.
        max_entries: about how many entries a stream keeps.
    """

    def __init__(
        self,
        connection: redis.Redis,
        *,
        interval_s: float,
        expires_s: float,
        max_entries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = connection
        self._interval_s = interval_s
        self._expires_s = expires_s
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._changed: dict[tuple[str, int], _Stream] = {}
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-streams", daemon=True)
        # Of the thread alone:
        self._unsent: list[tuple[_Stream, dict[str, str]]] = []
        self._away = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what is there, once, and end."""
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._redis.close()

    def begin(self, job_id: str, attempt: int, handle: GenerationHandle) -> None:
        """An attempt has entered the backend; its chunks are written from now on."""
        with self._lock:
            stream = self._open(job_id, attempt)
        self._news.set()

        def receive(chunk: TokenChunk) -> None:
            with self._lock:
                stream.text.append(chunk.text)
                stream.tokens += len(chunk.token_ids)
                stream.offset += len(chunk.text)
                self._changed[job_id, attempt] = stream
            self._news.set()

        handle.forward(receive)

    def end(self, job_id: str, attempt: int, end: StreamEnd) -> None:
        """The job's end is committed; also for an attempt that never reached the backend."""
        with self._lock:
            stream = self._open(job_id, attempt)
            stream.end = end
            del self._streams[job_id, attempt]
        self._news.set()

    def forget(self, job_id: str, attempt: int) -> None:
        """The attempt was handed back or lost its job: nothing more is written for it."""
        with self._lock:
            self._streams.pop((job_id, attempt), None)

    def _open(self, job_id: str, attempt: int) -> _Stream:
        key = (job_id, attempt)
        stream = self._streams.setdefault(key, _Stream(job_id, attempt))
        self._changed[key] = stream
        return stream

    # --------------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            last = self._stopping.is_set()
            self._take()
            written = self._write()
            if last:
                return
            self._stopping.wait(self._interval_s if written else _RETRY_S)
            if not written:
                self._news.set()

    def _take(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, {}
            for stream in changed.values():
                self._unsent += [(stream, entry) for entry in stream.take()]
        waiting = sum(len(entry.get("text", "")) for _, entry in self._unsent)
        if waiting > _MOST_WAITING_CHARS:
            kept = [(stream, entry) for stream, entry in self._unsent if entry["kind"] != "text"]
            # Their readers see the jump and take the answer from SQL.
            logger.warning("%d pieces of token streams are dropped", len(self._unsent) - len(kept))
            self._unsent = kept

    def _write(self) -> bool:
        """Whether nothing is left to write."""
        if not self._unsent:
            return True
        now = self._clock()
        renewed: set[_Stream] = set()
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                for stream, entry in self._unsent:
                    key = stream_key(stream.job_id)
                    fields: dict[Any, Any] = dict(entry)
                    pipeline.xadd(key, fields, maxlen=self._max_entries, approximate=True)
                    ends = entry["kind"] == "end"
                    if ends or (stream.lives_until - now < 0.75 * self._expires_s and stream not in renewed):
                        pipeline.pexpire(key, max(1, round(1000 * self._expires_s)))
                        renewed.add(stream)
                pipeline.execute()
        except (redis.RedisError, OSError) as error:
            # What was written in part is written again: readers pass over text that they have had.
            if not self._away:
                logger.warning("Token streams wait: Redis failed (%s)", redact_text(str(error)))
            self._away = True
            return False
        if self._away:
            logger.warning("Token streams go on")
        self._away = False
        self._unsent.clear()
        for stream in renewed:
            stream.lives_until = now + self._expires_s
        return True
