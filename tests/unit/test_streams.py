"""Token streams without Redis: whatever a reader sees of the entries, it ends with the right text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

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


@given(text=texts, pieces=cuts, drop=st.integers(0, 8), data=st.data())
def test_a_reader_that_comes_back_goes_on_where_it_was(
    text: str, pieces: list[int], drop: int, data: st.DataObject
) -> None:
    entries = [(f"{n + 1}-0", entry) for n, entry in enumerate(entries_of(1, text, pieces, ends=True))]
    stop = data.draw(st.integers(0, len(entries) - 1))
    heard = Heard()
    first = StreamReader()
    for entry_id, entry in entries[:stop]:
        heard.take(first.feed(entry_id, entry))
    second = StreamReader()
    kept = entries[drop:]  # the beginning may have been trimmed meanwhile
    at = [number for number, (entry_id, _) in enumerate(kept) if entry_id == first.last_id]
    if at:
        second.resume(*kept[at[0]])
        kept = kept[at[0] + 1 :]
    elif stop:
        heard.take([second.lost()])
    for entry_id, entry in kept:
        heard.take(second.feed(entry_id, entry))
    if not second.ended:
        assert second.needs_sql or not kept
        heard.take(second.conclude(1, text, END))
    assert heard.text == text
    assert heard.end == END


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
