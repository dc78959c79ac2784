"""Bulk beside urgent work at random: whatever arrives, no slot is idle, bulk keeps its own, and all end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config import EngineConfig
from backend.sequence import Sequence, Status
from tests.engine.engine_driver import ranked
from tests.unit.scheduler_desk import BULK, URGENT, Desk, bulk_running, is_bulk

_SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Arrival:
    step: int
    priority: int
    prompt: int
    max_tokens: int


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        priority=st.sampled_from([0, 3, 3, 5, 6, 6, 6, 9]),
        prompt=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
    ),
    min_size=1,
    max_size=24,
)


@st.composite
def desks(draw: st.DrawFn) -> dict[str, Any]:
    slots = draw(st.integers(1, 6))
    return {
        "slots": slots,
        "min_bulk": draw(st.integers(0, slots)),
        "tokens": slots + draw(st.sampled_from([0, 1, 3, 8, 100])),
        "blocks": draw(st.sampled_from([9, 9, 14, 200])),
        "prefix_cache": draw(st.booleans()),
    }


@settings(_SETTINGS, max_examples=600)
@given(options=desks(), jobs=arrivals, ahead=st.booleans())
def test_slots_are_never_idle_and_bulk_keeps_its_own(
    options: dict[str, Any], jobs: list[Arrival], ahead: bool
) -> None:
    """Any arrivals, planned one step ahead or not: all end, and each step keeps what the scheduler promises."""
    desk = Desk(**options)
    scheduler, least = desk.scheduler, options["min_bulk"]
    sequences: list[Sequence] = []
    pending = None
    for step in itertools.count():
        assert step < 2000
        sequences += [
            desk.add(job.prompt, max_tokens=job.max_tokens, priority=job.priority)
            for job in jobs
            if job.step == step
        ]
        before, bulk_before = set(scheduler.running), bulk_running(desk)
        kept = set(filter(is_bulk, scheduler.running[:least]))
        plan = desk.try_plan()
        assert scheduler.running == ranked(scheduler.running, least)
        desk.allocator.check([s.blocks for s in scheduler.running])
        waiting = list(scheduler.waiting())
        if bulk_running(desk) < min(bulk_before, least):  # bulk yields blocks to bulk only, and keeps its row
            assert not [s for s in scheduler.running if not is_bulk(s) and s in before]
            owed = min(sum(map(is_bulk, waiting)), least - bulk_running(desk))
            assert options["slots"] - len(scheduler.running) >= owed
        if options["blocks"] == 200 and any(not s.in_flight for s in waiting) and plan is not None:
            full = len(scheduler.running) == options["slots"] or plan.num_tokens == options["tokens"]
            assert full or any(s.in_flight for s in waiting)
        for s in waiting:  # nobody urgent waits while other bulk than that which is kept runs on
            if (
                options["blocks"] == 200
                and plan is not None
                and s.first_scheduled_at is None
                and not is_bulk(s)
                # Hits that are not known before leave tokens to the next step.
                and not options["prefix_cache"]
            ):
                others = [r for r in scheduler.running[least:] if is_bulk(r) and r in before]
                assert not others or plan.num_tokens == options["tokens"] or any(w.in_flight for w in waiting)
        if options["blocks"] == 200 and plan is not None and not any(s.in_flight for s in waiting):
            # No text beyond bulk's share is computed before more urgent text that has a row or could have one.
            rows = zip(plan.sequences[plan.num_decode :], plan.lengths[plan.num_decode :], strict=True)
            kept |= set(filter(is_bulk, scheduler.running[:least]))
            text = list(rows)
            least_urgent = max((s.priority for s, _ in text if s not in kept), default=-1)
            unmet = [s for s in scheduler.running if s.num_computed < s.num_known and s not in kept]
            if len(scheduler.running) < options["slots"]:
                unmet += waiting
            assert all(s.priority >= least_urgent for s in unmet)
            if any(not is_bulk(s) for s in unmet):
                share = options["tokens"] * least // options["slots"]
                assert sum(length for s, length in text if s in kept) <= max(1, share) + least
        if not ahead and plan is not None:
            desk.retire(plan)
        elif ahead:
            if pending is not None:
                desk.retire(pending)
            pending = plan
        if step > 12 and not scheduler.has_work() and pending is None:
            break
    assert all(s.status is Status.FINISHED and len(s.output_ids) == s.max_new_tokens for s in sequences)
    desk.allocator.check([])


@_SETTINGS
@given(
    slots=st.integers(2, 6),
    extra=st.sampled_from([0, 2, 30]),
    blocks=st.sampled_from([16, 200]),
    bulk=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=5),
    prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 10),
)
def test_bulk_ends_however_much_is_urgent(
    slots: int, extra: int, blocks: int, bulk: list[tuple[int, int]], prompt: int, max_tokens: int
) -> None:
    desk = Desk(slots=slots, tokens=slots + extra, blocks=blocks, min_bulk=1)

    def flood() -> None:
        while sum(not is_bulk(s) for s in desk.scheduler.waiting()) < slots:
            desk.add(prompt, max_tokens=max_tokens, priority=0)

    flood()
    desk.step()
    sequences = [desk.add(length, max_tokens=count, priority=BULK) for length, count in bulk]
    # Each waits for one row of the urgent ones, whose prompts share a step's tokens, and then computes its own.
    life = slots * prompt + max_tokens
    bound = sum(life + length + count for length, count in bulk)
    for _ in range(bound):
        flood()
        desk.step()
    assert all(s.status is Status.FINISHED for s in sequences)
    assert max(s.preemptions for s in sequences) == 0


@_SETTINGS
@given(
    slots=st.integers(2, 8),
    share=st.floats(0, 0.99),
    count=st.integers(1, 8),
    prompts=st.lists(st.integers(1, 6), min_size=8, max_size=8),
    before=st.integers(1, 4),
)
def test_urgent_requests_start_in_the_next_step_while_bulk_fills_every_slot(
    slots: int, share: float, count: int, prompts: list[int], before: int
) -> None:
    kept = EngineConfig(max_num_seqs=slots, bulk_min_share=share).min_bulk_seqs
    desk = Desk(slots=slots, tokens=64, blocks=1000, min_bulk=kept)
    for _ in range(2 * slots):
        desk.add(3, max_tokens=50, priority=BULK)
    for _ in range(before):
        desk.step()
    assert bulk_running(desk) == slots
    urgent = [desk.add(length, priority=URGENT) for length in prompts[:count]]
    desk.step()
    assert [len(s.output_ids) for s in urgent] == [int(i < slots - kept) for i in range(count)]
    assert bulk_running(desk) == max(kept, slots - count)
