"""Bulk beside urgent work: who gets the tokens of a step and the blocks, where there are too few for all."""

from __future__ import annotations

import pytest

from backend.sequence import Status
from tests.unit.scheduler_desk import BULK, URGENT, Desk, run_ahead


def test_bulk_that_is_kept_grows_at_the_cost_of_urgent_rows() -> None:
    """Else they would take its blocks again and again, and it would never end."""
    desk = Desk(blocks=5, slots=3, min_bulk=1)
    bulk = desk.add(6, priority=BULK, max_tokens=12)
    urgent = desk.add(6, priority=URGENT, max_tokens=9)
    while bulk.status is not Status.FINISHED:
        desk.step()
    assert (bulk.preemptions, urgent.preemptions) == (0, 1)


def test_an_urgent_prompt_is_not_held_up_by_the_long_prompt_of_bulk() -> None:
    desk = Desk(slots=10, tokens=20, min_bulk=1)
    bulk = desk.add(200, priority=BULK)
    desk.step()
    assert bulk.num_computed == 20
    urgent = desk.add(17, priority=URGENT)
    desk.step()
    # Bulk gets what the urgent prompt leaves, at least a tenth.
    assert (bulk.num_computed, len(urgent.output_ids)) == (23, 1)
    for _ in range(5):
        desk.add(40, priority=URGENT)
        before = bulk.num_computed
        desk.step()
        assert bulk.num_computed - before == 2


@pytest.mark.parametrize("least", [0, 1])
def test_an_urgent_prompt_is_not_held_up_by_long_prompts_of_bulk_beyond_its_share(least: int) -> None:
    desk = Desk(slots=4, tokens=20, min_bulk=least)
    bulk = [desk.add(length, priority=BULK) for length in (1, 100, 100)]
    desk.step()
    urgent = desk.add(15, priority=URGENT)
    before = sum(s.num_computed for s in bulk)
    desk.step()
    assert len(urgent.output_ids) == 1
    assert sum(s.num_computed for s in bulk) - before == 5  # what is left of the step is not wasted
    assert [s.preemptions for s in bulk] == [0, 0, 0]


def test_a_prompt_is_not_held_up_by_the_long_prompt_of_a_less_urgent_request() -> None:
    desk = Desk(slots=4, tokens=20)
    long = desk.add(100, priority=5)
    desk.step()
    first = desk.add(12, priority=0)
    middle = desk.add(30, priority=5)
    desk.step()
    assert len(first.output_ids) == 1
    assert (long.num_computed, middle.num_computed) == (28, 0)  # in the order of their arrival after that


def test_bulk_is_not_preempted_for_requests_that_the_step_cannot_take() -> None:
    desk = Desk(slots=6, tokens=20)
    bulk = [desk.add(2, priority=BULK) for _ in range(5)]
    desk.step()
    first = desk.add(60, priority=URGENT)
    more = [desk.add(60, priority=URGENT) for _ in range(4)]
    for _ in range(3):
        desk.step()
    assert first.num_computed == 45
    assert [s.preemptions for s in bulk] == [0] * 5
    assert all(s.first_scheduled_at is None for s in more)


def test_bulk_gives_way_one_by_one_where_its_tokens_fill_the_step() -> None:
    desk = Desk(slots=4, tokens=4)
    bulk = [desk.add(1, priority=BULK) for _ in range(4)]
    desk.step()
    urgent = [desk.add(3, priority=URGENT) for _ in range(3)]
    desk.step()
    assert (urgent[0].num_computed, sum(s.preemptions for s in bulk)) == (1, 1)


@pytest.mark.parametrize("count", [2, 20])
def test_an_urgent_request_passes_bulk_that_lacks_blocks_while_other_bulk_runs(count: int) -> None:
    desk = Desk(blocks=40, slots=20, tokens=256, min_bulk=2)
    for _ in range(count):
        desk.add(120, max_tokens=20, priority=BULK)  # 35 of the 40 blocks each
    run_ahead(desk, 3)
    urgent = desk.add(4, priority=0)
    desk.step()
    assert len(urgent.output_ids) == 1


def test_bulk_that_lacks_blocks_gets_them_in_the_end() -> None:
    desk = Desk(blocks=40, slots=20, tokens=256, min_bulk=2)
    bulk = [desk.add(120, max_tokens=20, priority=BULK) for _ in range(4)]

    def flood(_: int) -> None:
        if desk.scheduler.num_waiting < 8:
            desk.add(8, priority=0)

    run_ahead(desk, 400, flood)
    assert all(s.status is Status.FINISHED for s in bulk)


@pytest.mark.parametrize(("prompt", "urgent"), [(2000, 100), (1500, 300)])
def test_blocks_that_text_has_still_to_take_are_not_given_away(prompt: int, urgent: int) -> None:
    """Else the long prompts of bulk that is kept preempt urgent requests that were let in a moment before."""
    desk = Desk(blocks=264, block_size=16, slots=32, tokens=512, min_bulk=4)
    sequences = [desk.add(prompt, max_tokens=50, priority=BULK) for _ in range(12)]

    def arrive(step: int) -> None:
        if step % 4 == 0 and step < 300:
            sequences.append(desk.add(urgent, max_tokens=40, priority=0))

    computed = run_ahead(desk, 1200, arrive)
    assert all(s.status is Status.FINISHED for s in sequences)
    # What decode rows grow by is not known before, and may cost a preemption.
    assert computed <= 1.05 * sum(len(s.prompt_ids) + len(s.output_ids) - 1 for s in sequences)


def test_nobody_is_preempted_for_one_who_then_lacks_blocks_all_the_same() -> None:
    """Rows at the border of a block take a block in the same step."""
    desk = Desk(blocks=44, block_size=2, slots=12, tokens=64)
    for priority in [URGENT] * 4 + [BULK] * 6:
        desk.add(3 if priority == URGENT else 5, max_tokens=60, priority=priority)
    run_ahead(desk, 4)
    first = desk.add(14, max_tokens=4, priority=0)
    seen = desk.scheduler.num_preemptions
    for _ in range(30):
        desk.step()
        if desk.scheduler.num_preemptions > seen or first.status is Status.RUNNING:
            break
    assert first.status is Status.RUNNING


def test_bulk_that_joins_takes_what_urgent_text_leaves_of_a_step() -> None:
    desk = Desk(blocks=14, slots=10, tokens=30, min_bulk=1)
    desk.add(8, max_tokens=50, priority=URGENT)
    desk.step()
    bulk = desk.add(28, priority=BULK)
    waits = desk.add(28, priority=URGENT)  # for blocks
    desk.step()
    assert (bulk.num_computed, waits.num_computed) == (28, 0)
