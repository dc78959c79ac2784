"""What is in a job's token stream, and how a reader makes sense of it. Nothing here talks to Redis.

A job's stream is one Redis Stream, ``tokenmill:stream:<job id>``. Its entries carry the attempt that wrote them:

=========  ==============================================================================================
``restart``  an attempt has begun; text of earlier attempts does not count any more
``text``     text that will not change, with its offset in characters from the beginning of the answer
``end``      the job has ended and its end is committed: state, finish reason, usage, error
=========  ==============================================================================================

A worker that was declared dead may still write. Readers drop what comes from an attempt older than the newest that
they know, so such text never reaches anybody. Text that was trimmed or lost shows as a jump of the offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Self

from models_db.records import StoredResult

STREAM_PREFIX = "tokenmill:stream:"
FIRST_ID = "0-0"


def stream_key(job_id: str) -> str:
    """The Redis key of a job's stream."""
    return STREAM_PREFIX + job_id


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a job ended. ``completion_tokens`` counts what was generated, as the ``result`` row does."""

    state: str  # succeeded, failed, cancelled, expired
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error_type: str | None = None
    error_message: str | None = None

    @classmethod
    def of(
        cls, state: str, result: StoredResult | None, error_type: str | None, error_message: str | None
    ) -> Self:
        """The end of a job that has this result, or none."""
        if result is None:
            return cls(state, error_type=error_type, error_message=error_message)
        return cls(
            state,
            result.finish_reason,
            result.prompt_tokens,
            result.completion_tokens,
            result.cached_tokens,
            error_type,
            error_message,
        )


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader is: behind which entry, and what it has been told. As text, the ``id`` of an event.

    The entry's own id would not do. One entry can lead to two events, and what comes from SQL has no entry; whoever
    goes on between two such events must be told the second and nothing twice.
    """

    entry_id: str = FIRST_ID
    attempt: int = 0
    offset: int = 0  # characters handed out of this attempt's text
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.entry_id}.{self.attempt}.{self.offset}{'.end' if self.ended else ''}"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One thing that a reader is told.

    ``id`` is what to give as ``last_id`` to go on after this event: then come exactly those that follow it here. After
    ``restart`` everything received before is void: text begins again from the start.
    """

    id: str
    kind: Literal["restart", "text", "end"]
    text: str = ""
    tokens: int = 0  # that completed the text; 0 where that is not known any more
    end: StreamEnd | None = None


def restart_fields(attempt: int) -> dict[str, str]:
    """Entry for the beginning of an attempt."""
    return {"kind": "restart", "attempt": str(attempt)}


def text_fields(attempt: int, offset: int, text: str, tokens: int) -> dict[str, str]:
    """Entry for text that begins ``offset`` characters into the answer."""
    return {
        "kind": "text",
        "attempt": str(attempt),
        "offset": str(offset),
        "text": text,
        "tokens": str(tokens),
    }


def end_fields(attempt: int, length: int, end: StreamEnd) -> dict[str, str]:
    """Entry for the end of the job, whose whole text has ``length`` characters."""
    return {
        "kind": "end",
        "attempt": str(attempt),
        "offset": str(length),
        "end": json.dumps(asdict(end), separators=(",", ":")),
    }


class StreamReader:
    """Turns entries, in order, into events; keeps where it is.

    ``gap`` is set when text is missing that Redis does not have any more: the answer must then come from SQL, once
    the job has ended; ``needs_sql`` says that it has.

    Args:
        position: of the last event that was had; the beginning by default.
    """

    def __init__(self, position: Position | None = None) -> None:
        begin = position or Position()
        self.last_id = begin.entry_id
        self.attempt = begin.attempt
        self.offset = begin.offset
        self.ended = begin.ended
        self.gap = False
        self.needs_sql = False

    @property
    def position(self) -> Position:
        """Where it is now."""
        return Position(self.last_id, self.attempt, self.offset, self.ended)

    def lost(self) -> StreamEvent:
        """Where the reader was is not known: begin again."""
        return self._event("restart")

    def feed(self, entry_id: str, fields: Mapping[str, str]) -> list[StreamEvent]:
        """The events of one entry; none for what does not count."""
        attempt = int(fields["attempt"])
        if self.ended or attempt < self.attempt:
            self.last_id = entry_id
            return []
        # Who goes on behind the restart has not had the entry, which may be a text whose own restart was trimmed.
        events = self._begin(attempt)
        self.last_id = entry_id
        kind = fields["kind"]
        if kind == "restart":
            return events
        offset, text = int(fields["offset"]), fields.get("text", "")
        self.gap = self.gap or offset > self.offset
        if self.gap:
            self.needs_sql = kind == "end"
            return events
        if kind == "end":
            self.ended = True
            return [*events, self._event("end", end=StreamEnd(**json.loads(fields["end"])))]
        fresh = text[self.offset - offset :]
        if fresh:
            self.offset += len(fresh)
            events.append(self._event("text", text=fresh, tokens=int(fields["tokens"])))
        return events

    def conclude(self, attempt: int, text: str | None, end: StreamEnd) -> list[StreamEvent]:
        """The rest from SQL, where the stream has not brought it: what is missing of the text, and the end.

        ``text`` is the whole answer, or ``None`` where SQL has none because the job did not succeed.
        """
        events = self._begin(attempt)
        if text is not None and (rest := text[self.offset :]):
            self.offset += len(rest)
            events.append(self._event("text", text=rest))
        self.ended = True
        return [*events, self._event("end", end=end)]

    def _begin(self, attempt: int) -> list[StreamEvent]:
        """Turn to this attempt; a restart when text of another one has been handed out."""
        if attempt == self.attempt:
            return []
        spoken = self.offset > 0
        self.attempt, self.offset, self.gap, self.needs_sql = attempt, 0, False, False
        return [self._event("restart")] if spoken else []

    def _event(
        self,
        kind: Literal["restart", "text", "end"],
        *,
        text: str = "",
        tokens: int = 0,
        end: StreamEnd | None = None,
    ) -> StreamEvent:
        return StreamEvent(str(self.position), kind, text, tokens, end)
