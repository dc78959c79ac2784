"""Token streams without Redis: whatever a reader sees of the entries, it ends with the right text."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_db.records import JobStatus, StoredResult
from models_db.tables import JobState
from workers.client import StreamTimeoutError
from workers.client.streaming import Outcome, read_stream, read_stream_async
from workers.streams import (
    StreamEnd,
    StreamEvent,
    StreamReader,
    end_fields,
    restart_fields,
    text_fields,
)

END = StreamEnd("succeeded", "stop", 3, 5)


def entries_of(attempt: int, text: str, cuts: list[int], *, ends: bool) -> list[dict[str, str]]:
    """What an attempt writes that says ``text`` in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text_fields(attempt, start, text[start:stop], 1) for start, stop in itertools.pairwise(places)]
    return [restart_fields(attempt), *pieces, *([end_fields(attempt, len(text), END)] if ends else [])]


@dataclass
class Heard:
    """What a client has made of the events."""

    text: str = ""
    end: StreamEnd | None = None

    def take(self, events: list[StreamEvent]) -> None:
        for event in events:
            assert self.end is None, "nothing follows the end"
            if event.kind == "restart":
                self.text = ""
            self.text += event.text
            self.end = event.end


texts = st.text(min_size=0, max_size=40)
cuts = st.lists(st.integers(0, 100), max_size=6)


@given(late=texts, final=texts, late_cuts=cuts, final_cuts=cuts, data=st.data())
def test_text_of_a_dead_attempt_never_counts(
    late: str, final: str, late_cuts: list[int], final_cuts: list[int], data: st.DataObject
) -> None:
    """A worker declared dead goes on writing among the entries of its successor; some entries come twice."""
    old = entries_of(1, late, late_cuts, ends=False)
    new = entries_of(2, final, final_cuts, ends=True)
    merged = []
    while old or new:
        take_old = bool(old) and (not new or data.draw(st.booleans()))
        entry = (old if take_old else new).pop(0)
        merged += [entry] * data.draw(st.integers(1, 2))
    reader, heard = StreamReader(), Heard()
    for number, entry in enumerate(merged):
        heard.take(reader.feed(f"{number + 1}-0", entry))
    assert heard.text == final
    assert heard.end == END


class Shelf:
    """A job's entries as Redis would give them, a few at a time."""

    def __init__(self, entries: list[tuple[str, dict[str, str]]], at_once: int = 500) -> None:
        self.entries = entries
        self.at_once = at_once

    def xread(self, streams: dict[str, str], count: int, block: int | None = None) -> list[Any]:
        ((key, after),) = streams.items()
        found = [entry for entry in self.entries if number_of(entry[0]) > number_of(after)][: self.at_once]
        return [[key, found]] if found else []


class AsyncShelf(Shelf):
    async def xread(self, *arguments: Any, **options: Any) -> list[Any]:  # type: ignore[override]
        return super().xread(*arguments, **options)


def number_of(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


@dataclass
class Ended:
    """What SQL says of the job: it has ended, and this is its answer."""

    status: JobStatus
    result: StoredResult | None

    def look(self) -> Outcome:
        return self.status, self.result

    async def look_async(self) -> Outcome:
        return self.look()

    def read(self, shelf: Shelf, last_id: str | None = None) -> list[StreamEvent]:
        return list(read_stream(cast(Any, shelf), "j", self.look, url="redis://x", last_id=last_id))

    def read_async(self, shelf: Shelf, last_id: str | None = None) -> list[StreamEvent]:
        """Nothing in it ever waits, so that it needs no loop."""
        beside = cast(Any, AsyncShelf(shelf.entries, shelf.at_once))
        stream = read_stream_async(beside, "j", self.look_async, url="redis://x", last_id=last_id)
        events = []
        while True:
            try:
                stream.__anext__().send(None)
            except StopIteration as one:
                events.append(one.value)
            except StopAsyncIteration:
                return events


def ended_job(attempt: int, text: str | None) -> Ended:
    """One that succeeded with this text, or was cancelled."""
    state = JobState.CANCELLED if text is None else JobState.SUCCEEDED
    unset = {each.name: None for each in dataclasses.fields(JobStatus)}
    status = JobStatus(**unset | {"id": "j", "state": state, "attempt": attempt})  # type: ignore[arg-type]
    return Ended(status, None if text is None else StoredResult(text, "stop", 3, 5))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[tuple[str, dict[str, str]]], Ended, str | None]:
    """What was written of a job that has ended, in order; what SQL says; the whole text where it succeeded.

    Some attempts may have died, and go on writing among the entries of the next; any entry may come twice or be lost.
    """
    attempts = draw(st.integers(1, 3))
    said = [draw(texts) for _ in range(attempts)]
    succeeded = draw(st.booleans())
    written = [
        entries_of(number, text, draw(cuts), ends=number == attempts and succeeded)
        for number, text in enumerate(said, 1)
    ]
    merged: list[dict[str, str]] = []
    while any(written):
        turn = draw(st.sampled_from([each for each in written if each]))
        merged += [turn.pop(0)] * draw(st.sampled_from([1, 1, 1, 0, 2]))
    entries = [(f"{number}-0", entry) for number, entry in enumerate(merged, 1)]
    return entries, ended_job(attempts, said[-1] if succeeded else None), said[-1] if succeeded else None


def told(events: list[StreamEvent]) -> list[StreamEvent]:
    """Without their ids: an entry that was written twice may be passed at either of its places."""
    return [dataclasses.replace(event, id="") for event in events]


@settings(deadline=None)
@given(job=jobs(), at_once=st.integers(1, 5), trimmed=st.integers(0, 12))
def test_whoever_goes_on_after_any_event_is_told_exactly_the_rest(
    job: tuple[list[tuple[str, dict[str, str]]], Ended, str | None], at_once: int, trimmed: int
) -> None:
    entries, ended, text = job
    shelf = Shelf(entries, at_once)
    events = ended.read(shelf)
    whole = Heard()
    whole.take(events)
    assert whole.end is not None
    assert whole.text == text or text is None
    assert ended.read_async(shelf) == events
    later = Shelf(entries[trimmed:], at_once)  # what Redis still has when the reader comes back
    for cut, last in enumerate(events, 1):
        rest = ended.read(shelf, last.id)
        assert told(rest) == told(events[cut:])
        assert ended.read_async(shelf, last.id) == rest
        if text is not None:
            heard = Heard()
            heard.take([*events[:cut], *ended.read(later, last.id)])
            assert heard == whole


def test_the_id_of_a_mere_entry_begins_again() -> None:
    """It does not tell how much of the text had been handed out; a client of an earlier version may send one."""
    entries = [(f"{n}-0", entry) for n, entry in enumerate(entries_of(1, "some words", [4], ends=True), 1)]
    ended = ended_job(1, "some words")
    assert [event.kind for event in ended.read(Shelf(entries), "2-0")] == ["restart", "text", "text", "end"]
    assert [event.kind for event in ended.read(Shelf(entries), "0-0")] == ["text", "text", "end"]


def test_a_reader_whose_time_is_over_goes_on_without_a_loss() -> None:
    """Also where a gap has been passed over meanwhile, whose text is still to come from SQL."""
    first, *_, last = entries_of(1, "some words", [4, 7], ends=True)
    shelf = Shelf(
        [("1-0", first), ("2-0", text_fields(1, 0, "some", 1)), ("4-0", text_fields(1, 7, "rds", 1))]
    )
    clock = partial(next, itertools.count())
    stream = read_stream(cast(Any, shelf), "j", lambda: None, url="redis://x", timeout_s=3, clock=clock)
    events = [next(stream)]
    with pytest.raises(StreamTimeoutError) as caught:
        next(stream)
    shelf.entries.append(("5-0", last))
    heard = Heard()
    heard.take([*events, *ended_job(1, "some words").read(shelf, caught.value.last_id)])
    assert heard == Heard("some words", END)


def test_an_answer_with_a_gap_is_taken_from_sql_as_soon_as_the_stream_ends() -> None:
    """Without another wait for entries, of which there will be none."""
    _, *_, last = entries_of(1, "some words", [4], ends=True)
    waits: list[int | None] = []

    class Watched(Shelf):
        def xread(self, streams: dict[str, str], count: int, block: int | None = None) -> list[Any]:
            waits.append(block)
            return super().xread(streams, count, block)

    events = ended_job(1, "some words").read(Watched([("9-0", last)]))
    assert [event.kind for event in events] == ["text", "end"]
    assert len(waits) == 1


@given(text=texts, pieces=cuts, missing=st.integers(1, 5))
def test_a_jump_is_noticed_and_mended_from_sql(text: str, pieces: list[int], missing: int) -> None:
    entries = entries_of(1, text, pieces, ends=True)
    lost = entries.pop(missing % len(entries))
    reader, heard = StreamReader(), Heard()
    for number, entry in enumerate(entries):
        heard.take(reader.feed(f"{number + 1}-0", entry))
    if not reader.ended:
        assert reader.needs_sql or lost["kind"] == "end"
        heard.take(reader.conclude(1, text, END))
    assert heard.text == text
    assert heard.end == END


def test_a_job_without_a_result_keeps_what_was_streamed() -> None:
    reader, heard = StreamReader(), Heard()
    heard.take(reader.feed("1-0", restart_fields(1)))
    heard.take(reader.feed("2-0", text_fields(1, 0, "some", 1)))
    heard.take(reader.conclude(1, None, StreamEnd("cancelled")))
    assert heard == Heard("some", StreamEnd("cancelled"))


def test_an_answer_of_a_later_attempt_replaces_what_was_streamed() -> None:
    reader, heard = StreamReader(), Heard()
    heard.take(reader.feed("1-0", restart_fields(1)))
    heard.take(reader.feed("2-0", text_fields(1, 0, "some", 1)))
    heard.take(reader.conclude(2, "other", END))
    assert heard == Heard("other", END)
