"""The two I/O slots: packed host and device buffers of a step, and the index that carries tokens over.

While the device computes from one slot, the CPU fills the other. Everything a step needs travels in one packed
int32 buffer, everything it yields comes back in another, so there is one copy each way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from backend.api import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from backend.rows import RowTable
from backend.sampling import SamplingBatch
from backend.scheduler import StepPlan
from backend.sequence import Sequence
from backend.streams import Mark, Streams

POISON = -0x35014542  # an int32 that is no token id, no block and no sensible float
_ONE = int(np.float32(1.0).view(np.int32))  # the bits of 1.0


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The largest step that a slot can hold."""

    tokens: int  # computed in a step
    rows: int  # sequences in a step
    blocks: int  # of one sequence
    logprobs: int  # alternatives reported for a token
    per_row: int = 18  # words of sampling parameters: seven padded for a graph, eleven for the sampler
    lists: int = 2 * MAX_LOGIT_BIAS + 2 * MAX_STOP_TOKEN_IDS  # words of biases and of ids that are masked

    @property
    def input_words(self) -> int:
        """int32 words of the host-to-device buffer. It holds the longest lists, rare as they are: a buffer that
        grew would move, and captured graphs would go on reading the old one."""
        return 4 * self.tokens + self.rows * (self.blocks + self.per_row + self.lists + 6) + 64

    @property
    def output_words(self) -> int:
        """int32 words of the device-to-host buffer: token, its log-probability, and the alternatives."""
        return self.rows * (2 + 2 * self.logprobs)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes that a step is padded to, so that a captured graph finds everything at the same address.

    Padding rows have no length; padding tokens belong to no row and write to the dummy block.
    """

    tokens: int
    rows: int
    sampled: int
    width: int  # blocks of a row
    dummy_slot: int


@dataclass(slots=True)
class StepInputs:
    """Device views of one step's inputs.

    Shapes: T tokens, R rows, S sampled rows, W blocks. All int32 where nothing else is said.
    """

    input_ids: torch.Tensor  # [T], 0 where a token is carried over
    positions: torch.Tensor  # [T]
    carry_over: torch.Tensor  # [T] sampled row of the previous step that feeds this token, or -1
    cache_slots: torch.Tensor  # [T] block * block_size + offset where a token's keys and values go
    query_starts: torch.Tensor  # [R + 1] first token of each row
    kv_lengths: torch.Tensor  # [R] tokens in the cache once this step has run
    decode_lengths: torch.Tensor  # [R] the same for decode rows, 0 for the others
    prefill_starts: torch.Tensor  # [R + 1] first token of each row, decode rows having none
    block_table: torch.Tensor  # [R, W]
    sample_tokens: torch.Tensor  # [S] token whose logits are sampled
    temperature: torch.Tensor  # float32 [S]; from here to output_index: for the sampling inside a graph
    top_k: torch.Tensor  # [S]
    top_p: torch.Tensor  # float32 [S]
    min_p: torch.Tensor  # float32 [S]
    seed: torch.Tensor  # int64 [S]
    output_index: torch.Tensor  # [S]
    sampling: SamplingBatch  # of the rows without padding


LONG_PREFILL_ROWS = 16
LONG_PREFILL_TOKENS = 256


def is_long_prefill(lengths: list[int]) -> bool:
    """Whether a step's prefill, of rows of so many tokens, is better off with large tiles of queries and keys."""
    return 0 < len(lengths) <= LONG_PREFILL_ROWS and max(lengths) >= LONG_PREFILL_TOKENS


@dataclass(slots=True)
class StepShape:
    """What the host knows of a step without looking at the device: the lengths, as plain lists."""

    num_decode: int = 0
    has_prefill: bool = False
    long_prefill: bool = False  # a few rows of many tokens prefill, so that large tiles pay
    query_lengths: list[int] = field(default_factory=list)
    kv_lengths: list[int] = field(default_factory=list)
    has_carry: bool = False
    new_penalty_rows: list[Sequence] = field(default_factory=list)


class _Packer:
    """Lays arrays one after the other into the packed host buffer, and finds them again on the device."""

    def __init__(self, host: NDArray[np.int32], device: torch.Tensor) -> None:
        self._host = host
        self._device = device
        self.used = 0

    def put_padded(self, values: NDArray[np.int32], size: int, padding: int) -> torch.Tensor:
        """Append a vector of 4-byte numbers, padded to ``size``."""
        start, end = self.used, self.used + size
        filled = start + values.size
        self._host[start:filled] = values
        self._host[filled:end] = padding
        self.used = end
        return self._device[start:end]

    def put(self, values: NDArray[np.int32] | NDArray[np.float32] | NDArray[np.int64]) -> torch.Tensor:
        """Append an array of 4- or 8-byte numbers; returns its view on the device."""
        self.used += self.used % (values.itemsize // 4)  # an int64 lies on an even word
        words = values.size * values.itemsize // 4
        start, end = self.used, self.used + words
        self._host[start:end] = values.reshape(-1).view(np.int32)
        self.used = end
        view = self._device[start:end]
        if values.dtype == np.float32:
            view = view.view(torch.float32)
        elif values.dtype == np.int64:
            view = view.view(torch.int64)
        return view.view(values.shape) if values.ndim > 1 else view


class Slot:
    """One pair of buffers with the marks that say when each may be used again.

    The host input buffer may be rewritten once ``output_ready`` of the step that used it has been reached: the
    copy in comes before the computation, and that before the copy out.
    """

    def __init__(self, limits: SlotLimits, device: torch.device, streams: Streams, *, poison: bool) -> None:
        self._limits = limits
        self._device = device
        self._poison = poison
        self._streams = streams
        words = limits.input_words
        self._host_in = torch.zeros(words, dtype=torch.int32, pin_memory=streams.pin_memory)
        self._host_in_np: NDArray[np.int32] = self._host_in.numpy()
        self._device_in = torch.zeros(words, dtype=torch.int32, device=device)
        self._host_out = torch.zeros(limits.output_words, dtype=torch.int32, pin_memory=streams.pin_memory)
        self.device_out = torch.zeros(limits.output_words, dtype=torch.int32, device=device)
        self.input_ready = streams.mark()
        self.compute_start = streams.mark(timed=True)  # set after the wait for the copy in
        self.compute_end = streams.mark(timed=True)
        self.output_ready: Mark = streams.mark()
        self.plan: StepPlan | None = None
        self.inputs: StepInputs | None = None
        self.shape = StepShape()
        self.sampled: list[Sequence] = []
        self.num_logprobs = -1  # alternatives in this step's output; -1: no log-probabilities
        self._words_in = 0

    # ------------------------------------------------------------------------------------------------- the way in

    def fill(self, plan: StepPlan, rows: RowTable, block_size: int, layout: StepLayout | None = None) -> None:
        """Write a plan into the host buffer, padded to ``layout``. Never blocks and never touches the device."""
        sequences = plan.sequences
        decode, count = plan.num_decode, len(sequences)
        self.plan = plan
        self.sampled = sampled = [sequences[i] for i in plan.sampled]
        known_blocks = rows.num_blocks
        for sequence in sequences:
            if not sequence.row_filled or known_blocks[sequence.row] != len(sequence.blocks):
                rows.update(sequence)

        row_ids = np.array([s.row for s in sequences], dtype=np.intp)
        starts = np.array(plan.starts, dtype=np.int32)
        lengths = np.array(plan.lengths, dtype=np.int32)
        query_starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        kv_lengths = starts + lengths
        width = int(-(-int(kv_lengths.max()) // block_size))
        tables = rows.blocks[row_ids, :width]

        tokens = np.zeros(plan.num_tokens, dtype=np.int32)
        carry = np.full(plan.num_tokens, -1, dtype=np.int32)
        sources = [s.sample_index if s.in_flight else -1 for s in sequences[:decode]]
        carry[:decode] = sources
        has_carry = any(source >= 0 for source in sources)
        for index, source in enumerate(sources):
            if source < 0:
                sequence = sequences[index]
                tokens[index] = (sequence.output_ids or sequence.prompt_ids)[-1]
        if count == decode:
            positions, token_rows = starts, np.arange(count)
        else:
            token_rows = np.repeat(np.arange(count), lengths)
            positions = (
                np.arange(plan.num_tokens, dtype=np.int32) - query_starts[token_rows] + starts[token_rows]
            )
            for index in range(decode, count):
                start = plan.starts[index]
                at = int(query_starts[index])
                tokens[at : at + plan.lengths[index]] = sequences[index].tokens(
                    start, start + plan.lengths[index]
                )
        cache_slots = tables[token_rows, positions // block_size] * block_size + positions % block_size

        sample_rows = np.array(plan.sampled, dtype=np.intp)
        state_rows = row_ids[sample_rows]
        indices = np.array([len(s.output_ids) + s.in_flight for s in sampled], dtype=np.int32)
        extra = _sampling_lists(sampled, state_rows, indices, rows)
        pack = _Packer(self._host_in_np, self._device_in)
        if layout is None:
            layout = StepLayout(plan.num_tokens, count, len(sampled), width, dummy_slot=0)
        elif layout.width > width:
            tables = np.pad(tables, ((0, 0), (0, layout.width - width)))
        decode_lengths = kv_lengths.copy()
        decode_lengths[decode:] = 0
        self.inputs = _pack_step(
            pack,
            layout,
            block_size,
            input_ids=tokens,
            positions=positions,
            carry_over=carry,
            cache_slots=cache_slots,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            decode_lengths=decode_lengths,
            prefill_starts=np.maximum(query_starts, decode),
            sample_tokens=query_starts[1:][sample_rows] - 1,
            block_table=tables.reshape(-1),
            temperature=rows.temperature[state_rows].view(np.int32),
            top_k=rows.top_k[state_rows],
            top_p=rows.top_p[state_rows].view(np.int32),
            min_p=rows.min_p[state_rows].view(np.int32),
            seed=rows.seed[state_rows].view(np.int32),
            output_index=indices,
            sampling=lambda: self._fill_sampling(pack, indices, state_rows, rows, extra),
        )
        self._words_in = pack.used
        self.shape = StepShape(
            num_decode=decode,
            has_prefill=count > decode,
            long_prefill=is_long_prefill(plan.lengths[decode:]),
            query_lengths=plan.lengths,
            kv_lengths=kv_lengths.tolist(),
            has_carry=has_carry,
            new_penalty_rows=[s for s in sampled if not s.penalties_ready and s.sampling.uses_penalties],
        )
        # From here on these rows' newest tokens are on the device only.
        for index, sequence in enumerate(sampled):
            sequence.sample_index = index
            sequence.in_flight += 1
            sequence.penalties_ready = True

    def blank(self, layout: StepLayout, block_size: int) -> StepInputs:
        """Fill the buffers with nothing but padding; the views are those of every step with this layout."""
        pack = _Packer(self._host_in_np, self._device_in)
        empty = np.empty(0, dtype=np.int32)
        names = (
            "input_ids",
            "positions",
            "carry_over",
            "cache_slots",
            "query_starts",
            "kv_lengths",
            "decode_lengths",
            "prefill_starts",
            "sample_tokens",
            "block_table",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "output_index",
        )
        inputs = _pack_step(
            pack, layout, block_size, sampling=SamplingBatch.empty, **dict.fromkeys(names, empty)
        )
        self._words_in = pack.used
        return inputs

    def _fill_sampling(
        self,
        pack: _Packer,
        indices: NDArray[np.int32],
        rows_of: NDArray[np.intp],
        rows: RowTable,
        extra: _SamplingLists,
    ) -> SamplingBatch:
        temperature = rows.temperature[rows_of]
        penalty_row = rows.penalty_row[rows_of]
        any_random = bool(temperature.any())
        any_penalty = bool((penalty_row >= 0).any())
        self.num_logprobs = int(rows.logprobs[rows_of].max(initial=-1))
        top_k, top_p, min_p = rows.top_k[rows_of], rows.top_p[rows_of], rows.min_p[rows_of]
        return SamplingBatch(
            seed=pack.put(rows.seed[rows_of]),
            temperature=pack.put(temperature),
            top_k=pack.put(top_k),
            top_p=pack.put(top_p),
            min_p=pack.put(min_p),
            output_index=pack.put(indices),
            repetition_penalty=pack.put(rows.repetition_penalty[rows_of]),
            presence_penalty=pack.put(rows.presence_penalty[rows_of]),
            frequency_penalty=pack.put(rows.frequency_penalty[rows_of]),
            penalty_row=pack.put(penalty_row),
            bias_ids=pack.put(extra.bias_ids),
            bias_values=pack.put(extra.bias_values),
            banned_ids=pack.put(extra.banned_ids),
            any_random=any_random,
            any_top_k=any_random and bool(top_k.any()),
            any_top_p=any_random and bool((top_p < 1.0).any()),
            any_min_p=any_random and bool((min_p > 0.0).any()),
            any_penalty=any_penalty,
            any_bias=extra.bias_ids.shape[1] > 0,
            any_banned=extra.banned_ids.shape[1] > 0,
            num_logprobs=self.num_logprobs,
        )

    def copy_in(self) -> None:
        """Host-to-device copy; call within the h2d stream's context."""
        self._device_in[: self._words_in].copy_(self._host_in[: self._words_in], non_blocking=True)

    # ------------------------------------------------------------------------------------------------ the way out

    @property
    def plain(self) -> bool:
        """Whether sampling needs no more than a graph does: no penalties, biases, bans or log-probabilities."""
        sampling = self.inputs.sampling if self.inputs else None
        return sampling is None or not (
            sampling.any_penalty or sampling.any_bias or sampling.any_banned or sampling.num_logprobs >= 0
        )

    @property
    def device_tokens(self) -> torch.Tensor:
        """int32 ``[S]``: this step's sampled tokens on the device, which the next step carries over."""
        return self.device_out[: len(self.sampled)]

    def store_output(
        self,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor | None,
        top_ids: torch.Tensor | None,
        top_logprobs: torch.Tensor | None,
    ) -> None:
        """Pack a step's outcome; call within the compute stream's context."""
        count = len(self.sampled)
        self.device_out[:count].copy_(token_ids)
        if logprobs is not None:
            self.device_out[count : 2 * count].view(torch.float32).copy_(logprobs)
        if top_ids is not None and top_logprobs is not None and self.num_logprobs > 0:
            size = count * self.num_logprobs
            at = 2 * count
            self.device_out[at : at + size].copy_(top_ids.reshape(-1))
            self.device_out[at + size : at + 2 * size].view(torch.float32).copy_(top_logprobs.reshape(-1))

    def copy_out(self) -> None:
        """Device-to-host copy; call within the d2h stream's context."""
        words = self._output_words()
        self._host_out[:words].copy_(self.device_out[:words], non_blocking=True)

    def _output_words(self) -> int:
        count = len(self.sampled)
        return count if self.num_logprobs < 0 else count * (2 + 2 * self.num_logprobs)

    def read_tokens(self) -> list[int]:
        """The sampled tokens, once ``output_ready`` has been reached."""
        tokens: list[int] = self._host_out[: len(self.sampled)].tolist()
        return tokens

    def read_logprobs(self) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Log-probability, alternatives' ids and their log-probabilities, a row each."""
        count, width = len(self.sampled), self.num_logprobs
        size, at = count * width, 2 * count
        chosen = self._host_out[count:at].view(torch.float32).tolist()
        ids = self._host_out[at : at + size].view(count, width).tolist()
        values = self._host_out[at + size : at + 2 * size].view(torch.float32).view(count, width).tolist()
        return chosen, ids, values

    def release(self) -> None:
        """The step has retired: nothing may read these host buffers until they are written again."""
        self.plan = None
        self.inputs = None
        self.sampled = []
        if self._poison:
            self._host_in.fill_(POISON)
            self._host_out.fill_(POISON)

    def abandon(self) -> None:
        """After a fault: never free the page-locked buffers. PyTorch would ask the device whether it still uses them,
        and abort the process, at its end for one, where the device has failed."""
        if self._streams.pin_memory:
            for buffer in (self._host_in, self._host_out):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))


def _pack_step(
    pack: _Packer,
    layout: StepLayout,
    block_size: int,
    *,
    input_ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    carry_over: NDArray[np.int32],
    cache_slots: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    kv_lengths: NDArray[np.int32],
    decode_lengths: NDArray[np.int32],
    prefill_starts: NDArray[np.int32],
    sample_tokens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    temperature: NDArray[np.int32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.int32],
    min_p: NDArray[np.int32],
    seed: NDArray[np.int32],
    output_index: NDArray[np.int32],
    sampling: Callable[[], SamplingBatch],
) -> StepInputs:
    """The order of things in the buffer. Sampling comes last: it is the part whose size varies."""
    end = int(query_starts[-1]) if query_starts.size else 0
    return StepInputs(
        seed=pack.put_padded(seed, 2 * layout.sampled, 0).view(torch.int64),  # first: on an even word
        temperature=pack.put_padded(temperature, layout.sampled, 0).view(torch.float32),
        top_k=pack.put_padded(top_k, layout.sampled, 0),
        top_p=pack.put_padded(top_p, layout.sampled, _ONE).view(torch.float32),
        min_p=pack.put_padded(min_p, layout.sampled, 0).view(torch.float32),
        output_index=pack.put_padded(output_index, layout.sampled, 0),
        input_ids=pack.put_padded(input_ids, layout.tokens, 0),
        positions=pack.put_padded(positions, layout.tokens, 0),
        carry_over=pack.put_padded(carry_over, layout.tokens, -1),
        cache_slots=pack.put_padded(cache_slots, layout.tokens, layout.dummy_slot),
        query_starts=pack.put_padded(query_starts, layout.rows + 1, end),
        kv_lengths=pack.put_padded(kv_lengths, layout.rows, 0),
        decode_lengths=pack.put_padded(decode_lengths, layout.rows, 0),
        prefill_starts=pack.put_padded(prefill_starts, layout.rows + 1, end),
        sample_tokens=pack.put_padded(sample_tokens, layout.sampled, 0),
        block_table=pack.put_padded(
            block_table, layout.rows * layout.width, layout.dummy_slot // block_size
        ).view(layout.rows, layout.width),
        sampling=sampling(),
    )


@dataclass(slots=True)
class _SamplingLists:
    """The options that are lists, padded: ids with -1."""

    bias_ids: NDArray[np.int32]  # [S, Kb]
    bias_values: NDArray[np.float32]  # [S, Kb]
    banned_ids: NDArray[np.int32]  # [S, Ks]


def _sampling_lists(
    sampled: list[Sequence], rows_of: NDArray[np.intp], indices: NDArray[np.int32], rows: RowTable
) -> _SamplingLists:
    count = len(sampled)
    biased = [(i, sampled[i].sampling.logit_bias) for i in np.flatnonzero(rows.has_bias[rows_of])]
    width = max((len(bias) for _, bias in biased), default=0)
    bias_ids = np.full((count, width), -1, dtype=np.int32)
    bias_values = np.zeros((count, width), dtype=np.float32)
    for i, bias in biased:
        bias_ids[i, : len(bias)] = list(bias.keys())
        bias_values[i, : len(bias)] = list(bias.values())
    # The host knows the index of the output to come, so it masks the ends itself.
    early = np.flatnonzero(indices < rows.min_tokens[rows_of])
    banned = [(i, sorted(sampled[i].ending_ids)) for i in early]
    width = max((len(ids) for _, ids in banned), default=0)
    banned_ids = np.full((count, width), -1, dtype=np.int32)
    for i, ids in banned:
        banned_ids[i, : len(ids)] = ids
    return _SamplingLists(bias_ids, bias_values, banned_ids)
