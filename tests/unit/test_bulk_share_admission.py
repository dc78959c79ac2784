"""Bulk beside urgent work in the backends without a scheduler: rows are admitted by share, then priority."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.admission import Admission, Row
from backend.api import GenerationHandle, GenerationRequest, Prompt
from tests.unit.scheduler_desk import BULK, URGENT

_SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def row(priority: int) -> Row:
    request = GenerationRequest(request_id="r", prompt=Prompt(prompt="x"), priority=priority)
    return Row(GenerationHandle(request, lambda: None), submitted=0.0)


@_SETTINGS
@given(
    slots=st.integers(1, 5),
    data=st.data(),
    turns=st.lists(
        st.tuples(st.sampled_from(["add", "add", "end", "cancel"]), st.integers(0, 9), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_admission_fills_slots_by_share_then_priority(
    slots: int, data: st.DataObject, turns: list[tuple[str, int, int]]
) -> None:
    least = data.draw(st.integers(0, slots))
    admission: Admission[Row] = Admission(slots=slots, max_waiting=1000, min_bulk=least)
    waiting: list[Row] = []
    for what, priority, index in turns:
        if what == "add":
            waiting.append(row(priority))
            admission.add(waiting[-1])
        elif what == "end" and admission.running:
            admission.finish(admission.running[index % len(admission.running)])
        elif what == "cancel" and waiting:
            gone = waiting.pop(index % len(waiting))
            admission.cancel(gone)
            assert [ended for ended, _ in admission.end_early(0.0)] == [gone]
        running = list(admission.running)
        for admitted in admission.admit(0.0):
            bulk = [r for r in waiting if r.is_bulk]
            owed = bulk and sum(r.is_bulk for r in running) < least
            wanted = min(bulk if owed else waiting, key=lambda r: r.handle.request.priority)
            assert admitted is wanted
            waiting.remove(admitted)
            running.append(admitted)
        assert len(running) == slots or not waiting
        assert admission.num_waiting == len(waiting)


def test_a_flood_of_urgent_rows_leaves_bulk_its_slot() -> None:
    admission: Admission[Row] = Admission(slots=2, max_waiting=1000, min_bulk=1)
    rows = [row(URGENT) for _ in range(20)]
    for each in rows:
        admission.add(each)
    admission.admit(0.0)
    bulk = row(BULK)
    admission.add(bulk)
    admission.finish(rows[0])
    assert admission.admit(0.0) == [bulk]
    assert admission.running == [rows[1], bulk]
