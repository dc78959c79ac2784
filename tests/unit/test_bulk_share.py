"""Bulk beside urgent work: urgent requests start at once, and bulk keeps its share of the slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.admission import Admission, Row
from backend.api import GenerationHandle, GenerationRequest, Prompt
from backend.config import BULK_PRIORITY, EngineConfig
from backend.sequence import Sequence, Status
from tests.engine.engine_driver import ranked
from tests.unit.scheduler_desk import Desk
from workers.settings import load_settings

BULK, URGENT = 6, 3
_SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def is_bulk(sequence: Sequence) -> bool:
    return sequence.priority >= BULK_PRIORITY


def bulk_running(desk: Desk) -> int:
    return sum(map(is_bulk, desk.scheduler.running))


# ------------------------------------------------------------------------------------------------ the configuration


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


# ---------------------------------------------------------------------------------------------------- the scheduler


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


def test_bulk_that_is_kept_grows_at_the_cost_of_urgent_rows() -> None:
    """Else they would take its blocks again and again, and it would never end."""
    desk = Desk(blocks=5, slots=3, min_bulk=1)
    bulk = desk.add(6, priority=BULK, max_tokens=12)
    urgent = desk.add(6, priority=URGENT, max_tokens=9)
    while bulk.status is not Status.FINISHED:
        desk.step()
    assert (bulk.preemptions, urgent.preemptions) == (0, 1)


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


def test_an_urgent_prompt_is_not_held_up_by_the_long_prompt_of_bulk() -> None:
    desk = Desk(slots=10, tokens=20, min_bulk=1)
    bulk = desk.add(200, priority=BULK)
    desk.step()
    assert bulk.num_computed == 20
    urgent = desk.add(17, priority=URGENT)
    desk.step()
    assert (bulk.num_computed, len(urgent.output_ids)) == (
        23,
        1,
    )  # what the urgent prompt leaves, at least a tenth
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


def run_ahead(desk: Desk, steps: int, arrive: Callable[[int], None] = lambda step: None) -> int:
    """Steps planned one ahead, as the engine does; the tokens that they computed."""
    pending, computed = None, 0
    for step in range(steps):
        arrive(step)
        plan = desk.try_plan()
        computed += plan.num_tokens if plan is not None else 0
        if pending is not None:
            desk.retire(pending)
        pending = plan
    if pending is not None:
        desk.retire(pending)
    return computed


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
                and not options[
                    "prefix_cache"
                ]  # hits that are not known before leave tokens to the next step
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


def test_bulk_without_a_share_starves() -> None:
    """What the share is for."""
    desk = Desk(slots=2, min_bulk=0)
    bulk = desk.add(2, priority=BULK, max_tokens=2)
    for _ in range(200):
        while sum(not is_bulk(s) for s in desk.scheduler.waiting()) < 2:
            desk.add(2, priority=URGENT, max_tokens=3)
        desk.step()
    assert not bulk.output_ids


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


# ------------------------------------------------------------------------------------------------ the other backends


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
