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
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One thing that a reader is told.

    ``id`` is what to give as ``last_id`` to go on after this event. After ``restart`` everything received before
    is void: text begins again from the start.
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
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.offset = 0  # characters handed out of this attempt's text
        self.last_id = FIRST_ID
        self.gap = False
        self.needs_sql = False
        self.ended = False
        self._spoken = False  # whether a text has been handed out, of whichever attempt

    def resume(self, entry_id: str, fields: Mapping[str, str]) -> None:
        """Go on after this entry, which a reader has had before."""
        self.attempt = int(fields["attempt"])
        self.offset = int(fields.get("offset", "0")) + len(fields.get("text", ""))
        self.last_id = entry_id
        self._spoken = True
        self.ended = fields["kind"] == "end"

    def lost(self) -> StreamEvent:
        """The entry to go on from is not there any more: begin again."""
        self._spoken = False
        return StreamEvent(FIRST_ID, "restart")

    def feed(self, entry_id: str, fields: Mapping[str, str]) -> list[StreamEvent]:
        """The events of one entry; none for what does not count."""
        attempt = int(fields["attempt"])
        self.last_id = entry_id
        if self.ended or attempt < self.attempt:
            return []
        events = []
        if attempt > self.attempt:
            self.attempt, self.offset, self.gap, self.needs_sql = attempt, 0, False, False
            if self._spoken:
                self._spoken = False
                events.append(StreamEvent(entry_id, "restart"))
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
            return [*events, StreamEvent(entry_id, "end", end=StreamEnd(**json.loads(fields["end"])))]
        fresh = text[self.offset - offset :]
        if fresh:
            self._spoken = True
            self.offset += len(fresh)
            events.append(StreamEvent(entry_id, "text", text=fresh, tokens=int(fields["tokens"])))
        return events

    def conclude(self, attempt: int, text: str | None, end: StreamEnd) -> list[StreamEvent]:
        """The rest from SQL, where the stream has not brought it: what is missing of the text, and the end.

        ``text`` is the whole answer, or ``None`` where SQL has none because the job did not succeed.
        """
        events = []
        if attempt != self.attempt and self._spoken:
            events.append(StreamEvent(self.last_id, "restart"))
        if attempt != self.attempt:
            self.offset = 0
        if text is not None and text[self.offset :]:
            events.append(StreamEvent(self.last_id, "text", text=text[self.offset :]))
        self.attempt, self.ended = attempt, True
        return [*events, StreamEvent(self.last_id, "end", end=end)]
