"""The two I/O slots: packed host and device buffers of a step, and the index that carries tokens over.

While the device computes from one slot, the CPU fills the other. Everything a step needs travels in one packed
int32 buffer, everything it yields comes back in another, so there is one copy each way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from backend.api import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from backend.row_params import NUM_LASTING, NUM_PARAMS, RowParam, padding_column
from backend.rows import RowTable
from backend.scheduler import StepPlan
from backend.sequence import Sequence
from backend.streams import Mark, Streams

POISON = -0x35014542  # an int32 that is no token id, no block and no sensible float
HEADER_WORDS = 4  # of a penalty row to be rebuilt: the row, first prompt token, first output token, end
_MINUS_INF = int(np.float32(-np.inf).view(np.int32))  # its bits


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The largest step that a slot can hold."""

    tokens: int  # computed in a step
    rows: int  # sequences in a step
    blocks: int  # of one sequence
    logprobs: int  # alternatives reported for a token
    penalty_tokens: int  # known tokens of the sequences with penalties that are admitted in one step
    # Words of a row's biases and of ids that are masked.
    lists: int = 2 * MAX_LOGIT_BIAS + 4 * MAX_STOP_TOKEN_IDS

    @property
    def input_words(self) -> int:
        """int32 words of the host-to-device buffer. It holds the longest lists, rare as they are: a buffer that
        grew would move, and captured graphs would go on reading the old one."""
        fixed = NUM_PARAMS + 2 + self.blocks + 6
        return 4 * self.tokens + self.rows * (fixed + self.lists + HEADER_WORDS) + self.penalty_tokens + 64

    @property
    def record_words(self) -> int:
        """int32 words of a row's log-probabilities: its token's, ids of the alternatives, theirs."""
        return 1 + 2 * self.logprobs

    @property
    def output_words(self) -> int:
        """int32 words of the device-to-host buffer: the tokens of all rows, then their records."""
        return self.rows * (1 + self.record_words)


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
    seeds: torch.Tensor  # int64 [S]
    params: torch.Tensor  # [parameters, S]; see backend.row_params
    lists: torch.Tensor  # [*] biases and bans, to which the parameters refer
    packed: torch.Tensor  # the whole buffer, in which StepShape.fresh finds tokens


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
    # The slot whose plan FlashInfer follows; without graphs nothing is planned.
    planned_slot: int | None = None
    query_lengths: list[int] = field(default_factory=list)
    kv_lengths: list[int] = field(default_factory=list)
    has_carry: bool = False
    # Most alternatives that a row asks for; 0: no alternatives, -1: no log-probabilities.
    num_logprobs: int = -1
    params: NDArray[np.int32] = field(default_factory=lambda: np.empty((NUM_PARAMS, 0), dtype=np.int32))
    # Penalty rows to be rebuilt: headers from ``fresh_at`` on in the packed buffer, with borders counted from there.
    fresh: list[tuple[int, int, int, int]] = field(default_factory=list)
    fresh_at: int = 0


class _Packer:
    """Lays arrays one after the other into the packed host buffer, and finds them again on the device."""

    def __init__(self, host: NDArray[np.int32], device: torch.Tensor) -> None:
        self._host = host
        self.device = device  # int32, the same words there
        self.used = 0

    def put_padded(self, values: NDArray[np.int32], size: int, padding: int) -> torch.Tensor:
        """Append a vector of 4-byte numbers, padded to ``size``."""
        start, end = self.used, self.used + size
        filled = start + values.size
        self._host[start:filled] = values
        self._host[filled:end] = padding
        self.used = end
        return self.device[start:end]

    def put_columns(
        self, values: NDArray[np.int32], columns: int, padding: NDArray[np.int32]
    ) -> torch.Tensor:
        """Append a matrix of 4-byte numbers, padded to ``columns`` by the column ``padding``."""
        self._align()
        rows, given = values.shape
        start, end = self.used, self.used + rows * columns
        target = self._host[start:end].reshape(rows, columns)
        target[:, :given] = values
        target[:, given:] = padding[:, None]
        self.used = end
        return self.device[start:end].view(rows, columns)

    def rest(self) -> torch.Tensor:
        """What follows, up to the buffer's end, on the device."""
        self._align()
        return self.device[self.used :]

    def _align(self) -> None:
        """Go on at a multiple of 16 bytes: kernels are compiled once more for addresses that are none."""
        self.used += -self.used % 4


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
        params, lists = _sampling_params(sampled, state_rows, rows)
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
            seeds=rows.seed[state_rows].view(np.int32),
            params=params,
        )
        pack.put_padded(lists, lists.size, 0)
        fresh_at = pack.used
        fresh = _pack_fresh(pack, [s for s in sequences if not s.penalties_ready])
        self._words_in = pack.used
        self.shape = StepShape(
            num_decode=decode,
            has_prefill=count > decode,
            long_prefill=is_long_prefill(plan.lengths[decode:]),
            query_lengths=plan.lengths,
            kv_lengths=kv_lengths.tolist(),
            has_carry=has_carry,
            num_logprobs=int(params[RowParam.LOGPROBS].max(initial=-1)),
            params=params,
            fresh=fresh,
            fresh_at=fresh_at,
        )
        # From here on these rows' newest tokens are on the device only.
        for index, sequence in enumerate(sampled):
            sequence.sample_index = index
            sequence.in_flight += 1

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
            "seeds",
        )
        none = np.empty((NUM_PARAMS, 0), dtype=np.int32)
        inputs = _pack_step(pack, layout, block_size, params=none, **dict.fromkeys(names, empty))
        self._words_in = pack.used
        return inputs

    def copy_in(self) -> None:
        """Host-to-device copy; call within the h2d stream's context."""
        self._device_in[: self._words_in].copy_(self._host_in[: self._words_in], non_blocking=True)

    # ------------------------------------------------------------------------------------------------ the way out

    @property
    def num_logprobs(self) -> int:
        """Most alternatives in this step's output; -1: no log-probabilities."""
        return self.shape.num_logprobs

    @property
    def device_records(self) -> torch.Tensor:
        """int32: ``record_words`` for each sampled row, on the device."""
        return self.device_out[self._limits.rows :]

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
        if logprobs is None:
            return
        records = self._records(self.device_out)
        records[:, 0].view(torch.float32).copy_(logprobs)
        if top_ids is not None and top_logprobs is not None:
            width, most = top_ids.shape[1], self._limits.logprobs
            records[:, 1 : 1 + most] = -1  # a vocabulary may hold fewer tokens than were asked for
            records[:, 1 : 1 + width].copy_(top_ids)
            records[:, 1 + most : 1 + most + width].view(torch.float32).copy_(top_logprobs)

    def _records(self, buffer: torch.Tensor) -> torch.Tensor:
        count, words = len(self.sampled), self._limits.record_words
        return buffer[self._limits.rows :][: count * words].view(count, words)

    def copy_out(self) -> None:
        """Device-to-host copy; call within the d2h stream's context."""
        words = self._output_words()
        self._host_out[:words].copy_(self.device_out[:words], non_blocking=True)

    def _output_words(self) -> int:
        count = len(self.sampled)
        return count if self.num_logprobs < 0 else self._limits.rows + count * self._limits.record_words

    def read_tokens(self) -> list[int]:
        """The sampled tokens, once ``output_ready`` has been reached."""
        tokens: list[int] = self._host_out[: len(self.sampled)].tolist()
        return tokens

    def read_logprobs(self) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Log-probability, alternatives' ids and their log-probabilities, a row each.

        Ids of -1 fill up what a small vocabulary lacks. Rows that did not ask hold nothing of meaning.
        """
        records, most, width = self._records(self._host_out), self._limits.logprobs, self.num_logprobs
        floats = records.view(torch.float32)
        ids: list[list[int]] = records[:, 1 : 1 + width].tolist()
        return floats[:, 0].tolist(), ids, floats[:, 1 + most : 1 + most + width].tolist()

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
    seeds: NDArray[np.int32],
    params: NDArray[np.int32],
) -> StepInputs:
    """The order of things in the buffer. What follows is of no fixed size: lists, then tokens of penalty rows."""
    end = int(query_starts[-1]) if query_starts.size else 0
    return StepInputs(
        seeds=pack.put_padded(seeds, 2 * layout.sampled, 0).view(torch.int64),  # first: on an even word
        params=pack.put_columns(params, layout.sampled, padding_column()),
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
        lists=pack.rest(),
        packed=pack.device,
    )


def _sampling_params(
    sampled: list[Sequence], rows_of: NDArray[np.intp], rows: RowTable
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Parameters of the rows that sample, [parameters, S], and the pairs of words that they refer to."""
    count = len(sampled)
    params = np.zeros((NUM_PARAMS, count), dtype=np.int32)
    params[:NUM_LASTING] = rows.params[:, rows_of]
    indices = [len(s.output_ids) + s.in_flight for s in sampled]
    params[RowParam.OUTPUT_INDEX] = indices
    # The host knows the index of the output to come, so it lists the ends that are banned itself.
    early = params[RowParam.OUTPUT_INDEX] < rows.min_tokens[rows_of]
    listed = np.flatnonzero(rows.has_bias[rows_of] | early)
    if not listed.size:
        return params, np.empty(0, dtype=np.int32)
    entries: list[NDArray[np.int32]] = []
    at = 0
    for i in listed:
        bias = sampled[i].sampling.logit_bias
        banned = sorted(sampled[i].ending_ids) if early[i] else []
        pairs = np.empty((len(bias) + len(banned), 2), dtype=np.int32)
        pairs[:, 0] = [*bias, *banned]
        pairs[: len(bias), 1] = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
        pairs[len(bias) :, 1] = _MINUS_INF
        params[RowParam.BIAS_START, i] = at
        params[RowParam.BAN_START, i] = at + len(bias)
        at += len(pairs)
        params[RowParam.LIST_END, i] = at
        entries.append(pairs)
    return params, np.concatenate(entries).reshape(-1)


def _pack_fresh(pack: _Packer, joining: list[Sequence]) -> list[tuple[int, int, int, int]]:
    """Append what rebuilds the penalty rows of sequences that have just been admitted; returns the headers.

    This may happen in a sequence's first step: whatever its row's previous owner still had in flight was launched
    before.
    """
    for sequence in joining:
        sequence.penalties_ready = True
    fresh = [sequence for sequence in joining if sequence.sampling.uses_penalties]
    if not fresh:
        return []
    headers = []
    at = HEADER_WORDS * len(fresh)
    for sequence in fresh:
        middle = at + len(sequence.prompt_ids)
        end = middle + len(sequence.output_ids)
        headers.append((sequence.row, at, middle, end))
        at = end
    words = np.empty(at, dtype=np.int32)
    words[: HEADER_WORDS * len(fresh)] = np.array(headers, dtype=np.int32).reshape(-1)
    for sequence, (_, first, middle, end) in zip(fresh, headers, strict=True):
        words[first:middle] = sequence.prompt_ids
        words[middle:end] = sequence.output_ids
    pack.put_padded(words, words.size, 0)
    return headers
