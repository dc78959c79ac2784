"""Host arrays by row, and the packed buffers of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backend.api import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    GenerationHandle,
    GenerationRequest,
    Prompt,
    SamplingParams,
)
from backend.core import _logprob
from backend.row_params import RowParam
from backend.rows import RowTable
from backend.runner import sampling_batch
from backend.scheduler import StepPlan
from backend.sequence import Sequence, Status
from backend.slots import POISON, Slot, SlotLimits
from backend.streams import InOrderStreams

CPU = torch.device("cpu")


def make_sequence(row: int, blocks: list[int], prompt: int = 3, **sampling: Any) -> Sequence:
    params = SamplingParams(**sampling)
    request = GenerationRequest(
        request_id="r", prompt=Prompt(token_ids=tuple(range(10, 10 + prompt))), sampling=params
    )
    sequence = Sequence(
        request,
        GenerationHandle(request, lambda: None),
        list(range(10, 10 + prompt)),
        number=row + 1,
        seed=params.seed or 0,
        eos_ids=frozenset({2}),
        max_new_tokens=50,
        arrived_at=0.0,
    )
    sequence.row, sequence.blocks, sequence.status = row, blocks, Status.RUNNING
    return sequence


def plan_of(*entries: tuple[Sequence, int, int, bool], num_decode: int = 0) -> StepPlan:
    plan = StepPlan(num_decode=num_decode)
    for sequence, start, length, samples in entries:
        plan.add(sequence, start, length, samples=samples)
    return plan


def make_slot(rows: int = 4, tokens: int = 32, *, poison: bool = True) -> Slot:
    return Slot(
        SlotLimits(tokens=tokens, rows=rows, blocks=8, logprobs=20, penalty_tokens=4 * tokens),
        CPU,
        InOrderStreams(),
        poison=poison,
    )


def fill(slot: Slot, plan: StepPlan, table: RowTable) -> Any:
    slot.fill(plan, table, 4)
    slot.copy_in()
    assert slot.inputs is not None
    return slot.inputs


def fill_batch(slot: Slot, plan: StepPlan, table: RowTable) -> Any:
    """The same, as the sampler takes it."""
    return sampling_batch(fill(slot, plan, table), slot.shape)


def test_a_row_is_taken_over_whole() -> None:
    table = RowTable(2, 8)
    table.update(make_sequence(1, [5, 6, 7], temperature=0.5, top_k=3, presence_penalty=1.0, seed=9))
    assert table.blocks[1, :3].tolist() == [5, 6, 7]
    assert (table.temperature[1], table.top_k[1], table.penalty_row[1], table.seed[1]) == (0.5, 3, 1, 9)
    table.update(make_sequence(1, [4]))
    assert (table.num_blocks[1], table.blocks[1, 0]) == (1, 4)
    assert (table.temperature[1], table.top_k[1], table.penalty_row[1], table.seed[1]) == (0.0, 0, -1, 0)


def test_a_row_gains_blocks() -> None:
    table = RowTable(1, 8)
    sequence = make_sequence(0, [3])
    table.update(sequence)
    table.temperature[0] = 7  # parameters are written once only
    sequence.blocks += [9, 1]
    table.update(sequence)
    assert table.blocks[0, :3].tolist() == [3, 9, 1]
    assert table.temperature[0] == 7


def test_a_mixed_step_on_the_device() -> None:
    slot, table = make_slot(), RowTable(4, 8)
    decoding = make_sequence(2, [6, 0], prompt=5)
    decoding.in_flight, decoding.sample_index = 1, 3
    retired = make_sequence(0, [1], prompt=3)
    retired.output_ids.append(77)
    chunk = make_sequence(1, [2, 3], prompt=9)
    inputs = fill(
        slot,
        plan_of((decoding, 5, 1, True), (retired, 3, 1, True), (chunk, 3, 4, False), num_decode=2),
        table,
    )
    assert inputs.input_ids.tolist() == [0, 77, 13, 14, 15, 16]
    assert inputs.carry_over.tolist() == [3, -1, -1, -1, -1, -1]
    assert inputs.positions.tolist() == [5, 3, 3, 4, 5, 6]
    assert inputs.cache_slots.tolist() == [0 * 4 + 1, 1 * 4 + 3, 2 * 4 + 3, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert inputs.query_starts.tolist() == [0, 1, 2, 6]
    assert inputs.kv_lengths.tolist() == [6, 4, 7]
    assert inputs.block_table.tolist()[0] == [6, 0]
    assert inputs.block_table.tolist()[2] == [2, 3]
    assert inputs.sample_tokens.tolist() == [0, 1]
    assert inputs.params[RowParam.OUTPUT_INDEX].tolist() == [1, 1]
    assert slot.shape.has_carry
    assert (decoding.in_flight, retired.in_flight, chunk.in_flight) == (2, 1, 0)
    assert (decoding.sample_index, retired.sample_index) == (0, 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_sampling_parameters_arrive_as_they_were_asked_for(rows: int) -> None:
    """Odd numbers of words before a 64-bit seed included."""
    slot, table = make_slot(), RowTable(4, 8)
    sequences = [
        make_sequence(
            i,
            [i],
            temperature=0.25 * (i + 1),
            seed=MAX_SEED - i,
            top_k=i,
            top_p=1 - i / 10,
            min_p=i / 10,
            repetition_penalty=1 + i,
            presence_penalty=i / 4,
            frequency_penalty=-i / 4,
            logit_bias={7: 1.5, 9: -2.0} if i else {},
            min_tokens=i,
            stop_token_ids=(5, 3),
        )
        for i in range(rows)
    ]
    batch = fill_batch(slot, plan_of(*((s, 0, 3, True) for s in sequences)), table)
    assert batch.seed.tolist() == [MAX_SEED - i for i in range(rows)]
    assert batch.temperature.tolist() == [0.25 * (i + 1) for i in range(rows)]
    assert batch.top_k.tolist() == list(range(rows))
    assert batch.top_p.tolist() == pytest.approx([1 - i / 10 for i in range(rows)])
    assert batch.min_p.tolist() == pytest.approx([i / 10 for i in range(rows)])
    assert batch.repetition_penalty.tolist() == [1.0 + i for i in range(rows)]
    assert batch.presence_penalty.tolist() == [i / 4 for i in range(rows)]
    assert batch.frequency_penalty.tolist() == [-i / 4 for i in range(rows)]
    assert batch.penalty_row.tolist() == [-1, *range(1, rows)]
    assert batch.any_random
    assert batch.any_banned == batch.any_bias == batch.any_penalty == batch.any_top_k == (rows > 1)
    if rows > 1:
        assert batch.bias_ids.tolist() == [[-1, -1]] + [[7, 9]] * (rows - 1)
        assert batch.bias_values.tolist() == [[0.0, 0.0]] + [[1.5, -2.0]] * (rows - 1)
        assert batch.banned_ids.tolist() == [[-1, -1, -1]] + [[2, 3, 5]] * (rows - 1)


def test_whole_sequences_travel_when_their_penalty_rows_begin_and_never_again() -> None:
    slot, table = make_slot(), RowTable(4, 8)
    plain = make_sequence(0, [0])
    chunk = make_sequence(3, [1, 2], prompt=6, frequency_penalty=0.5)  # starts with its prompt's first chunk
    again = make_sequence(1, [3, 4], prompt=2, repetition_penalty=1.2)  # was preempted
    again.output_ids = [71, 72, 71]
    inputs = fill(slot, plan_of((plain, 0, 3, True), (chunk, 0, 4, False), (again, 0, 5, True)), table)
    words = inputs.packed[slot.shape.fresh_at :].tolist()
    assert slot.shape.fresh == [(3, 8, 14, 14), (1, 14, 16, 19)]
    assert words[:8] == [3, 8, 14, 14, 1, 14, 16, 19]
    assert words[8:19] == [10, 11, 12, 13, 14, 15, 10, 11, 71, 72, 71]
    fill(slot, plan_of((chunk, 4, 2, True)), table)
    assert slot.shape.fresh == []


def test_ends_are_masked_up_to_min_tokens_and_no_longer() -> None:
    slot, table = make_slot(), RowTable(4, 8)
    sequence = make_sequence(0, [0, 1, 2], min_tokens=2)
    banned = []
    for outputs in range(4):
        sequence.output_ids = [50] * outputs
        batch = fill_batch(slot, plan_of((sequence, 3 + outputs, 1, True), num_decode=1), table)
        sequence.in_flight = 0
        banned.append(batch.banned_ids.tolist())
    assert banned == [[[2]], [[2]], [[]], [[]]]


def test_the_largest_step_fits_and_the_buffers_stay_where_they_are() -> None:
    """A graph that was captured over a buffer reads that address for ever."""
    slot, table = make_slot(rows=4, tokens=32), RowTable(4, 8)
    where = (slot._host_in.data_ptr(), slot._device_in.data_ptr(), slot.device_out.data_ptr())
    sequences = [
        make_sequence(
            i,
            list(range(8)),
            prompt=32,
            logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
            stop_token_ids=tuple(range(100, 100 + MAX_STOP_TOKEN_IDS)),
            min_tokens=9,
            seed=i,
            presence_penalty=1.0,
        )
        for i in range(4)
    ]
    batch = fill_batch(slot, plan_of(*((s, 24, 8, True) for s in sequences)), table)
    assert len(slot.shape.fresh) == 4
    assert batch.bias_ids.shape == (4, MAX_LOGIT_BIAS)
    assert batch.banned_ids.shape == (4, MAX_STOP_TOKEN_IDS + 1)
    assert batch.banned_ids[3, -1] == 100 + MAX_STOP_TOKEN_IDS - 1
    assert (slot._host_in.data_ptr(), slot._device_in.data_ptr(), slot.device_out.data_ptr()) == where


@pytest.mark.parametrize("width", [-1, 0, 1, 20])
def test_the_way_out(width: int) -> None:
    slot, table = make_slot(), RowTable(4, 8)
    logprobs = None if width < 0 else width
    sequences = [make_sequence(i, [i], logprobs=logprobs) for i in range(3)]
    fill(slot, plan_of(*((s, 0, 3, True) for s in sequences)), table)
    assert slot.num_logprobs == width
    rng = np.random.default_rng(1)
    tokens = torch.tensor([4, -1, 9])
    chosen = torch.tensor(rng.normal(size=3), dtype=torch.float32)
    ids = torch.tensor(rng.integers(0, 99, (3, max(width, 0))), dtype=torch.int32)
    values = torch.tensor(rng.normal(size=(3, max(width, 0))), dtype=torch.float32)
    if width < 0:
        slot.store_output(tokens, None, None, None)
    else:
        slot.store_output(tokens, chosen, ids if width else None, values if width else None)
    slot.copy_out()
    assert slot.read_tokens() == [4, -1, 9]
    if width >= 0:
        assert slot.read_logprobs() == (chosen.tolist(), ids.tolist(), values.tolist())


def test_a_vocabulary_with_fewer_tokens_than_alternatives_leaves_ids_of_minus_one() -> None:
    slot, table = make_slot(), RowTable(4, 8)
    fill(slot, plan_of((make_sequence(0, [0], logprobs=4), 0, 3, True)), table)
    slot.store_output(
        torch.tensor([1]),
        torch.tensor([-0.5]),
        torch.tensor([[1, 0]], dtype=torch.int32),
        torch.tensor([[-0.5, -1.0]]),
    )
    slot.copy_out()
    chosen, ids, values = slot.read_logprobs()
    assert (chosen, ids) == ([-0.5], [[1, 0, -1, -1]])
    assert values[0][:2] == [-0.5, -1.0]
    entry = _logprob(1, 0, 4, (chosen, ids, values))
    assert entry.top == ((1, -0.5), (0, -1.0))


def test_released_host_buffers_are_poisoned_when_asked() -> None:
    for poison in (True, False):
        slot, table = make_slot(poison=poison), RowTable(4, 8)
        fill(slot, plan_of((make_sequence(0, [1]), 0, 3, True)), table)
        slot.store_output(torch.tensor([5]), None, None, None)
        slot.copy_out()
        slot.release()
        assert slot.plan is None
        assert slot.inputs is None
        assert bool((slot._host_in == POISON).all()) is poison
        assert bool((slot._host_out == POISON).all()) is poison
