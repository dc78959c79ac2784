"""A stand-in for the model that checks what the engine hands it, and streams that are as late as a GPU may be.

The cache holds a tag for each token: its position, the token, and a digest of the tag before it, found through the
row's block table. So a row that reads one entry of another sequence, an old one or one in the wrong place, is seen
at once. The next token is a function of the last tag, thus of the whole history and of nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from backend.runner import sampling_batch
from backend.sampling import SamplingBatch
from backend.sequence import Sequence
from backend.slots import Slot, StepInputs, StepShape
from backend.streams import Mark

VOCAB = 12
BROKEN = VOCAB - 1  # a prompt with this token gets no usable logits


@dataclass(frozen=True)
class Tag:
    position: int
    token: int
    digest: bytes
    broken: bool

    @staticmethod
    def after(before: Tag | None, token: int) -> Tag:
        parent, position = (b"", 0) if before is None else (before.digest, before.position + 1)
        digest = hashlib.blake2b(parent + bytes([token]), digest_size=8).digest()
        return Tag(position, token, digest, token == BROKEN or (before is not None and before.broken))


def choose(tag: Tag, banned: frozenset[int]) -> int:
    """The token that follows a history; -1 if its logits are unusable."""
    if tag.broken:
        return -1
    token = int.from_bytes(tag.digest, "big") % BROKEN
    while token in banned:
        token = (token + 1) % BROKEN
    return token


def expected_output(sequence: Sequence) -> list[int]:
    """What a sequence must come to when nothing ends it early; -1 at its end if it must fail."""
    tag: Tag | None = None
    for token in sequence.prompt_ids:
        tag = Tag.after(tag, token)
    output: list[int] = []
    while True:
        assert tag is not None
        early = len(output) < sequence.sampling.min_tokens
        token = choose(tag, sequence.ending_ids if early else frozenset())
        output.append(token)
        if (
            token < 0
            or len(output) == sequence.max_new_tokens
            or (token in sequence.ending_ids and not early)
        ):
            return output
        tag = Tag.after(tag, token)


class LazyStreams:
    """Work is queued, in order, and done only when somebody waits for it, or when ``advance`` is called."""

    pin_memory = False

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def h2d(self) -> AbstractContextManager[object]:
        return nullcontext()

    compute = d2h = h2d

    def mark(self, *, timed: bool = False) -> Mark:
        return LazyMark(self)

    def synchronize(self) -> None:
        self.advance(len(self.queue))

    def advance(self, count: int) -> None:
        """Do up to ``count`` pieces of queued work."""
        for _ in range(min(count, len(self.queue))):
            self.queue.popleft()()


class LazyMark:
    def __init__(self, streams: LazyStreams) -> None:
        self._streams = streams
        self._recorded = 0
        self._reached = 0

    def record(self) -> None:
        self._recorded = number = self._recorded + 1

        def reach() -> None:
            self._reached = number

        self._streams.queue.append(reach)

    def wait(self) -> None:
        assert self._recorded > 0  # in order anyway

    def synchronize(self) -> None:
        while self._reached < self._recorded:
            self._streams.advance(1)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, LazyMark)
        assert self._reached == self._recorded
        assert earlier._reached == earlier._recorded
        return 0.0


class LazySlot(Slot):
    """A slot whose copies happen when the streams come to them."""

    lazy: LazyStreams

    def copy_in(self) -> None:
        words = self._words_in
        self.lazy.queue.append(lambda: _copy(self._device_in, self._host_in, words))

    def copy_out(self) -> None:
        words = self._output_words()
        self.lazy.queue.append(lambda: _copy(self._host_out, self.device_out, words))


def _copy(target: torch.Tensor, source: torch.Tensor, words: int) -> None:
    target[:words].copy_(source[:words])


class TaggedRunner:
    """Reads the device's inputs only, and only when its turn on the compute stream has come."""

    def __init__(self, num_blocks: int, block_size: int, streams: LazyStreams | None = None) -> None:
        self.cache: list[Tag | None] = [None] * (num_blocks * block_size)
        self.block_size = block_size
        self.streams = streams
        self.counts: dict[int, list[int]] = {}  # by penalty row: prompt length, then all tokens
        self.rows_computed = 0

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        inputs = slot.inputs
        assert inputs is not None
        shape = slot.shape
        before = None if previous is None else previous.device_tokens
        after = slot.device_tokens
        lengths, num_decode = list(slot.shape.query_lengths), slot.shape.num_decode
        assert all(n == 1 for n in lengths[:num_decode])
        assert slot.shape.has_carry == bool((slot_carry(slot) >= 0).any())

        def work() -> None:
            self._check_padding(inputs, lengths, num_decode, len(after))
            self._compute(_unpadded(inputs, lengths, len(after)), shape, before, after)

        if self.streams is None:
            work()
        else:
            self.streams.queue.append(work)

    def _check_padding(self, inputs: StepInputs, lengths: list[int], num_decode: int, sampled: int) -> None:
        """Padding rows have no tokens and no history, padding tokens go to the block that is nobody's."""
        rows, tokens = len(lengths), sum(lengths)
        dummy = len(self.cache) // self.block_size
        assert inputs.query_starts.diff().tolist()[:rows] == lengths
        assert set(inputs.query_starts[rows:].tolist()) == {tokens}
        assert not inputs.kv_lengths[rows:].any()
        assert (inputs.block_table[rows:] == dummy).all()
        assert (inputs.cache_slots[tokens:] == dummy * self.block_size).all()
        assert (inputs.carry_over[tokens:] == -1).all()
        assert not inputs.input_ids[tokens:].any()
        assert not inputs.positions[tokens:].any()
        assert not inputs.sample_tokens[sampled:].any()
        kv_lengths = inputs.kv_lengths.tolist()
        assert inputs.decode_lengths.tolist() == kv_lengths[:num_decode] + [0] * (
            len(kv_lengths) - num_decode
        )
        assert inputs.prefill_starts.tolist() == [max(s, num_decode) for s in inputs.query_starts.tolist()]

    def _compute(
        self,
        inputs: StepInputs,
        shape: StepShape,
        before: torch.Tensor | None,
        after: torch.Tensor,
    ) -> None:
        tokens = self._carried(inputs, before)
        starts = inputs.query_starts.tolist()
        positions, slots = inputs.positions.tolist(), inputs.cache_slots.tolist()
        tables, kv_lengths = inputs.block_table.tolist(), inputs.kv_lengths.tolist()
        assert len(tables) == len(kv_lengths) == len(starts) - 1
        # Keys and values first, in any order of rows that has each row's past before it.
        written: set[int] = set()
        last_tags: dict[int, Tag] = {}
        for row, (first, end) in enumerate(itertools.pairwise(starts)):
            assert positions[first:end] == list(range(kv_lengths[row] - (end - first), kv_lengths[row]))
            for at in range(first, end):
                position = positions[at]
                assert slots[at] == self._place(tables[row], position)
                assert slots[at] not in written, "two rows of one step write to the same place"
                written.add(slots[at])
                before_tag = None if position == 0 else self._read(tables[row], position - 1)
                self.cache[slots[at]] = Tag.after(before_tag, tokens[at])
        for row, (first, end) in enumerate(itertools.pairwise(starts)):
            self.rows_computed += 1
            last_tags[end - 1] = self._check_history(tables[row], kv_lengths[row], tokens[first:end])
        batch = sampling_batch(inputs, shape)
        samples = inputs.sample_tokens.tolist()
        sampled = [self._sample(batch, index, last_tags[at]) for index, at in enumerate(samples)]
        self._count(inputs, shape, batch, sampled, last_tags)
        after.copy_(torch.tensor(sampled, dtype=torch.int32))

    def _carried(self, inputs: StepInputs, before: torch.Tensor | None) -> list[int]:
        tokens, source = inputs.input_ids.tolist(), inputs.carry_over.tolist()
        for at, row in enumerate(source):
            if row >= 0:
                assert before is not None
                assert tokens[at] == 0, "a placeholder is 0"
                tokens[at] = max(int(before[row]), 0)
        assert all(0 <= token < VOCAB for token in tokens)
        return tokens

    def _place(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, table: list[int], position: int) -> Tag:
        tag = self.cache[self._place(table, position)]
        assert tag is not None, "read before it was written"
        assert tag.position == position
        return tag

    def _check_history(self, table: list[int], length: int, newest: list[int]) -> Tag:
        tag: Tag | None = None
        history = [self._read(table, position) for position in range(length)]
        for found in history:
            tag = Tag.after(tag, found.token)
            assert found == tag, "a row's history is not all its own"
        assert tag is not None
        assert [found.token for found in history[-len(newest) :]] == newest
        return tag

    def _sample(self, batch: SamplingBatch, index: int, tag: Tag) -> int:
        prompt_length = int(batch.seed[index])  # the tests set the seed to it
        assert int(batch.output_index[index]) == tag.position + 1 - prompt_length
        return choose(tag, frozenset(i for i in batch.banned_ids[index].tolist() if i >= 0))

    def _count(
        self,
        inputs: StepInputs,
        shape: StepShape,
        batch: SamplingBatch,
        sampled: list[int],
        last_tags: dict[int, Tag],
    ) -> None:
        """As the sampler does it: rows are rebuilt, then every sampled token is counted into its row."""
        words = inputs.packed[shape.fresh_at :]
        for header in shape.fresh:
            row, first, _, end = header
            at = 4 * shape.fresh.index(header)
            assert tuple(words[at : at + 4].tolist()) == header
            self.counts[row] = words[first:end].tolist()
        for index, row in enumerate(batch.penalty_row.tolist()):
            if row < 0:
                continue
            tag = last_tags[int(inputs.sample_tokens[index])]
            tokens = self.counts[row]
            seen: Tag | None = None
            for token in tokens:
                seen = Tag.after(seen, token)
            assert seen == tag, "the penalty row does not hold the sequence's tokens"
            tokens.append(max(sampled[index], 0))


def _unpadded(inputs: StepInputs, lengths: list[int], sampled: int) -> StepInputs:
    rows, tokens = len(lengths), sum(lengths)
    return dataclasses.replace(
        inputs,
        input_ids=inputs.input_ids[:tokens],
        positions=inputs.positions[:tokens],
        carry_over=inputs.carry_over[:tokens],
        cache_slots=inputs.cache_slots[:tokens],
        query_starts=inputs.query_starts[: rows + 1],
        kv_lengths=inputs.kv_lengths[:rows],
        block_table=inputs.block_table[:rows],
        sample_tokens=inputs.sample_tokens[:sampled],
    )


def slot_carry(slot: Slot) -> torch.Tensor:
    """The carry-over index as the host wrote it, before any copy."""
    assert slot.inputs is not None
    view = slot.inputs.carry_over
    start = view.storage_offset()
    return slot._host_in[start : start + view.numel()]
