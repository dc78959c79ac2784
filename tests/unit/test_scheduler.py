"""Who runs next: the scheduler's promises one by one, without a device. Tokens are retired by hand."""

from __future__ import annotations

from typing import Any

import pytest

from backend.scheduler import StepPlan
from backend.sequence import Status
from tests.unit.scheduler_desk import Desk


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [
        (s.number, start, n) for s, start, n in zip(plan.sequences, plan.starts, plan.lengths, strict=True)
    ]


def test_a_prompt_then_one_token_a_step() -> None:
    desk = Desk()
    sequence = desk.add(6, max_tokens=3)
    assert rows(desk.step()) == [(1, 0, 6)]
    assert rows(desk.step()) == [(1, 6, 1)]
    assert rows(desk.step()) == [(1, 7, 1)]
    assert sequence.status is Status.FINISHED
    assert not desk.scheduler.has_work()
    assert desk.scheduler.schedule(0.0) is None
    desk.allocator.check([])


def test_the_next_step_is_planned_before_the_last_one_has_retired() -> None:
    desk = Desk()
    desk.add(6, max_tokens=3)
    plans = [desk.plan(), desk.plan()]
    desk.retire(plans[0])
    plans.append(desk.plan())
    assert [rows(plan) for plan in plans] == [[(1, 0, 6)], [(1, 6, 1)], [(1, 7, 1)]]
    desk.retire(plans[1])
    assert desk.scheduler.schedule(0.0) is None  # the last token is in flight
    desk.retire(plans[2])
    assert not desk.scheduler.has_work()


def test_long_prompts_come_in_chunks_and_only_the_last_samples() -> None:
    desk = Desk(tokens=5)
    desk.add(12)
    plans = [desk.step() for _ in range(4)]
    assert [rows(plan) for plan in plans] == [[(1, 0, 5)], [(1, 5, 5)], [(1, 10, 2)], [(1, 12, 1)]]
    assert [plan.sampled for plan in plans] == [[], [], [0], [0]]
    assert [plan.num_decode for plan in plans] == [0, 0, 0, 1]


def test_decode_rows_come_first_and_are_never_crowded_out() -> None:
    desk = Desk(tokens=6, slots=4)
    desk.add(2)
    desk.step()
    desk.add(9, priority=0)  # more urgent, and with much to compute
    plan = desk.step()
    assert rows(plan) == [(1, 2, 1), (2, 0, 5)]
    assert plan.num_decode == 1
    assert rows(desk.step()) == [(1, 3, 1), (2, 5, 4)]


def test_what_is_left_of_a_step_goes_to_the_next_prompt() -> None:
    desk = Desk(tokens=10)
    for _ in range(3):
        desk.add(4)
    assert rows(desk.step()) == [(1, 0, 4), (2, 0, 4), (3, 0, 2)]
    # Two decode, the third goes on.
    assert rows(desk.step()) == [(1, 4, 1), (2, 4, 1), (3, 2, 2)]


def test_no_more_rows_than_slots() -> None:
    desk = Desk(slots=2)
    for _ in range(3):
        desk.add(2, max_tokens=2)
    assert len(desk.step().sequences) == 2
    assert desk.scheduler.num_waiting == 1
    desk.step()
    assert rows(desk.step()) == [(3, 0, 2)]


def test_priority_then_arrival() -> None:
    desk = Desk(slots=1)
    for priority in (5, 3, 3, 0):
        desk.add(2, max_tokens=1, priority=priority)
    assert [desk.step().sequences[0].number for _ in range(4)] == [4, 2, 3, 1]


def test_nothing_overtakes_a_request_that_does_not_fit_yet() -> None:
    desk = Desk(blocks=6, slots=4)
    desk.add(16, max_tokens=3)
    desk.step()
    desk.add(12)
    small = desk.add(2)
    assert len(desk.step().sequences) == 1
    assert small.status is Status.WAITING
    desk.step()
    assert [s.number for s in desk.step().sequences] == [2, 3]


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    desk = Desk(blocks=8, slots=4)
    for _ in range(4):
        desk.add(4, max_tokens=4)
    large = desk.add(28, max_tokens=2)
    for _ in range(12):
        desk.add(4, max_tokens=4)
        desk.step()
        if large.first_scheduled_at is not None:
            break
    assert large.first_scheduled_at is not None


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    desk = Desk(blocks=4)
    desk.add(8)
    desk.step()  # holds two blocks, and a third from the next step on
    late = desk.add(5)
    desk.step()
    assert late.status is Status.WAITING
    assert desk.scheduler.num_preemptions == 0


def test_the_least_urgent_is_preempted_and_starts_over() -> None:
    desk = Desk(blocks=5, slots=2)
    first, second = desk.add(8, max_tokens=9), desk.add(5, max_tokens=9)
    for _ in range(4):
        desk.step()
    plan = desk.step()  # both need a block, there is one
    assert desk.scheduler.num_preemptions == 0
    while not desk.scheduler.num_preemptions:
        plan = desk.step()
    assert [s.number for s in plan.sequences] == [1]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.status is Status.WAITING
    assert (second.num_computed, second.blocks, second.row) == (0, [], -1)
    kept = list(second.output_ids)
    while first.status is not Status.FINISHED:
        desk.step()
    plan = desk.step()
    assert rows(plan)[0] == (2, 0, 5 + len(kept))  # prompt and outputs are computed anew, at once
    assert second.output_ids[: len(kept)] == kept
    while desk.scheduler.has_work():
        desk.step()
    desk.allocator.check([])


def test_a_preempted_sequence_waits_for_its_row_in_flight() -> None:
    desk = Desk(blocks=4, slots=2)
    desk.add(4, max_tokens=9)
    second = desk.add(4, max_tokens=9)
    before = desk.plan()
    while second.status is not Status.WAITING:
        plan = desk.plan()
        if second.status is Status.WAITING:
            assert second.in_flight == 1
            assert second not in plan.sequences
            count = len(second.output_ids)
        desk.retire(before)
        before = plan
    assert len(second.output_ids) == count + 1
    assert second.in_flight == 0


@pytest.mark.parametrize("need", ["row", "blocks"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(need: str) -> None:
    desk = Desk(slots=1 if need == "row" else 2, blocks=100 if need == "row" else 4)
    low = desk.add(8, priority=9)
    desk.step()
    urgent = desk.add(8, priority=1, max_tokens=2)
    plan = desk.step()
    assert [s.number for s in plan.sequences] == [urgent.number]
    assert low.status is Status.WAITING
    desk.step()
    assert [s.number for s in desk.step().sequences] == [low.number]


def test_an_equal_priority_takes_nobodys_place() -> None:
    desk = Desk(slots=1)
    desk.add(4)
    desk.step()
    desk.add(4)
    for _ in range(5):
        assert [s.number for s in desk.step().sequences] == [1]


def test_an_ended_request_that_waited_leaves_no_trace() -> None:
    desk = Desk(slots=1)
    desk.add(4, max_tokens=2)
    desk.step()
    gone, next_ = desk.add(4), desk.add(4)
    desk.scheduler.finish(gone)
    assert desk.scheduler.num_waiting == 1
    desk.step()
    assert desk.step().sequences == [next_]


def test_ended_requests_that_waited_are_not_kept_behind_urgent_ones() -> None:
    desk = Desk(slots=1)
    desk.add(4, priority=0)
    desk.step()
    desk.add(4, priority=0)  # at the head of the queue all the time
    for _ in range(1000):
        desk.scheduler.finish(desk.add(4, priority=9))
    last = desk.add(4, priority=9)
    assert desk.scheduler.num_waiting == 2
    assert len(desk.scheduler._bulk._heap) < 100
    assert last in desk.scheduler.waiting()


def test_prefix_hits_are_not_computed_again() -> None:
    desk = Desk(prefix_cache=True)
    first = desk.add(10, max_tokens=1)
    desk.step()
    again = desk.add(10)
    other = desk.add(10, first=500)
    assert rows(desk.step()) == [(2, 8, 2), (3, 0, 10)]
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 8, 0)
    assert (desk.scheduler.prompt_tokens, desk.scheduler.cached_tokens) == (30, 8)


def test_twins_of_one_step_share_blocks_up_to_what_that_step_computes() -> None:
    desk = Desk(prefix_cache=True, tokens=11)
    twins = [desk.add(16), desk.add(16)]
    assert rows(desk.step()) == [(1, 0, 11)]
    # The second finds the two full blocks of the first step and, as the first goes on before it, the third.
    assert rows(desk.step()) == [(1, 11, 5), (2, 12, 4)]
    assert twins[0].blocks[:3] == twins[1].blocks[:3]


def test_a_request_that_cannot_be_admitted_leaves_matched_blocks_alone() -> None:
    desk = Desk(blocks=6, prefix_cache=True)
    desk.add(8, max_tokens=1)
    desk.step()
    desk.add(12, first=500, max_tokens=3)
    desk.step()
    blocked: Any = desk.add(20)
    free = desk.allocator.num_free
    desk.step()
    assert blocked.status is Status.WAITING
    assert desk.allocator.num_free == free - 1  # the running one's next block
    desk.allocator.check([s.blocks for s in desk.scheduler.running])


def test_sequences_with_penalties_join_as_far_as_their_tokens_fit_into_a_slot() -> None:
    """Those tokens travel along, also the cached ones; whoever does not fit comes next, and nobody overtakes."""
    desk = Desk(penalty_tokens=20)
    first = [desk.add(9, penalty=1.5, first=100 * i) for i in range(2)]
    waits, plain = desk.add(3, penalty=1.5), desk.add(2)
    plan = desk.plan()
    assert plan.sequences == first
    plan = desk.plan()
    assert plan.sequences[2:] == [waits, plain]
