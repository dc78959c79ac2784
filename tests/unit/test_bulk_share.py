"""Bulk beside urgent work: urgent requests start at once, and bulk keeps its share of the slots."""

from __future__ import annotations

import pytest

from backend.config import EngineConfig
from backend.sequence import Sequence, Status
from tests.unit.scheduler_desk import BULK, URGENT, Desk, is_bulk
from workers.settings import load_settings


@pytest.mark.parametrize(
    ("slots", "share", "kept"),
    [(32, 0.1, 4), (10, 0.1, 1), (2, 0.9, 1), (1, 0.1, 0), (4, 0, 0), (4, 1, 4), (1, 1, 1)],
)
def test_a_share_is_rounded_up_and_leaves_a_slot_to_others(slots: int, share: float, kept: int) -> None:
    assert EngineConfig(max_num_seqs=slots, bulk_min_share=share).min_bulk_seqs == kept


def test_the_engine_takes_the_workers_share_unless_it_has_its_own() -> None:
    assert load_settings(bulk_min_share=0.3).engine_config.bulk_min_share == 0.3
    both = load_settings(bulk_min_share=0.3, engine={"bulk_min_share": 0.2})
    assert both.engine_config.bulk_min_share == 0.2


def test_urgent_requests_take_all_slots_but_those_that_bulk_keeps() -> None:
    desk = Desk(slots=5, min_bulk=2)
    bulk = [desk.add(2, priority=BULK) for _ in range(5)]
    desk.step()
    urgent = [desk.add(2, priority=URGENT) for _ in range(4)]
    plan = desk.step()
    assert {s.number for s in plan.sequences} == {s.number for s in bulk[:2] + urgent[:3]}
    assert [s.preemptions for s in bulk] == [0, 0, 1, 1, 1]


def test_a_slot_that_becomes_free_goes_to_bulk_that_has_fewer_than_its_own() -> None:
    desk = Desk(slots=2, min_bulk=1)
    first = [desk.add(2, priority=URGENT, max_tokens=count) for count in (2, 9)]
    desk.step()
    bulk, urgent = desk.add(2, priority=BULK), desk.add(2, priority=URGENT)
    assert desk.step().sequences == first  # nobody loses a slot to bulk
    assert desk.step().sequences == [first[1], bulk]
    assert urgent.status is Status.WAITING


def test_slots_that_bulk_does_not_ask_for_are_used() -> None:
    desk = Desk(slots=3, min_bulk=2)
    urgent = [desk.add(2, priority=URGENT) for _ in range(3)]
    assert desk.step().sequences == urgent


def test_the_next_bulk_is_kept_when_one_ends() -> None:
    desk = Desk(slots=4, min_bulk=1)
    short, long = (desk.add(2, priority=BULK, max_tokens=count) for count in (2, 20))
    urgent = desk.add(2, priority=URGENT)
    desk.step()
    assert desk.scheduler.running == [short, urgent, long]
    desk.step()
    assert short.status is Status.FINISHED
    assert desk.scheduler.running == [long, urgent]
    more = [desk.add(2, priority=0) for _ in range(5)]
    desk.step()
    assert desk.scheduler.running == [long, *more[:3]]


def test_a_most_urgent_request_takes_a_slot_from_less_urgent_ones_not_that_of_bulk() -> None:
    desk = Desk(slots=3, min_bulk=1)
    short, *others = (desk.add(2, priority=5, max_tokens=count) for count in (2, 20, 20))
    desk.step()
    desk.step()
    assert short.status is Status.FINISHED
    bulk, urgent = desk.add(2, priority=BULK), desk.add(2, priority=0)
    desk.step()
    assert desk.scheduler.running == [bulk, urgent, others[0]]


def test_bulk_that_is_not_ready_keeps_its_row_and_nobody_waits_for_it() -> None:
    """Both owed have penalties, and a step has room for those of one: the row of the other stays its own."""
    desk = Desk(slots=4, min_bulk=2, penalty_tokens=10, tokens=64)
    bulk = [desk.add(8, priority=BULK, penalty=1.2) for _ in range(2)]
    urgent = [desk.add(4, priority=URGENT) for _ in range(4)]
    desk.step()
    assert [s.status for s in [*bulk, *urgent]] == [
        Status.RUNNING,
        Status.WAITING,
        Status.RUNNING,
        Status.RUNNING,
        Status.WAITING,
        Status.WAITING,
    ]
    desk.step()
    assert set(desk.scheduler.running) == {*bulk, *urgent[:2]}


def test_a_row_that_is_owed_to_bulk_is_not_made_free_twice() -> None:
    desk = Desk(slots=2, min_bulk=2)
    first = desk.add(2, priority=9)
    desk.step()
    second = desk.add(2, priority=BULK)
    desk.step()
    assert set(desk.scheduler.running) == {first, second}
    assert first.preemptions == 0


def test_the_work_of_a_step_does_not_grow_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(slots=8, tokens=16)
    for _ in range(8):
        desk.add(2, priority=BULK)
    desk.step()
    for _ in range(5000):
        desk.add(10, priority=URGENT)
    asked = 0

    def waits(sequence: Sequence) -> bool:
        nonlocal asked
        asked += 1
        return sequence.status is Status.WAITING

    monkeypatch.setattr(desk.scheduler._urgent, "_waits", waits)
    desk.step()
    assert 0 < asked < 50


def test_bulk_without_a_share_starves() -> None:
    """What the share is for."""
    desk = Desk(slots=2, min_bulk=0)
    bulk = desk.add(2, priority=BULK, max_tokens=2)
    for _ in range(200):
        while sum(not is_bulk(s) for s in desk.scheduler.waiting()) < 2:
            desk.add(2, priority=URGENT, max_tokens=3)
        desk.step()
    assert not bulk.output_ids
