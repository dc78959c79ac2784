"""Who runs in the next step: admission, chunked prefill, decode, preemption, priority.

Only lengths matter here, never token values, so a step can be planned while the one before it still computes.
The engine thread is the only caller.
"""

from __future__ import annotations

import heapq
import sys
from bisect import insort
from dataclasses import dataclass, field

from backend.blocks import BlockAllocator
from backend.sequence import Sequence, Status


@dataclass(slots=True)
class StepPlan:
    """One step: rows in batch order, decode rows (one new token each, all of them sampled) first.

    Row ``i`` computes ``lengths[i]`` tokens of ``sequences[i]`` from position ``starts[i]`` on. ``sampled`` lists
    the rows whose last token is the newest of its sequence, so that the step samples a successor.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    num_decode: int = 0
    num_tokens: int = 0

    def add(self, sequence: Sequence, start: int, length: int, *, samples: bool) -> None:
        """Append a row."""
        if samples:
            self.sampled.append(len(self.sequences))
        self.sequences.append(sequence)
        self.starts.append(start)
        self.lengths.append(length)
        self.num_tokens += length

    def extend(self, other: StepPlan) -> None:
        """Append the rows of ``other``."""
        self.sampled += [len(self.sequences) + index for index in other.sampled]
        self.sequences += other.sequences
        self.starts += other.starts
        self.lengths += other.lengths
        self.num_tokens += other.num_tokens


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.number


class Scheduler:
    """Holds the waiting and the running sequences and plans steps over them.

    The running list is kept in order of (priority, arrival), so the one to preempt is always its last and a plan
    never has to be undone: whoever is scheduled first is preempted last. The best sequence therefore always
    advances, and every request that fits the cache alone terminates.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_penalty_tokens: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._max_tokens = max_num_batched_tokens
        # Known tokens of the sequences with penalties that are admitted in one step: a slot holds no more.
        self._max_penalty_tokens = sys.maxsize if max_penalty_tokens is None else max_penalty_tokens
        self._prefix_cache = prefix_cache
        # A heap; ended entries are dropped when they surface, or when they are most of it.
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._num_waiting = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, preempted ones included."""
        return self._num_waiting

    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return self._num_waiting > 0 or bool(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or preempted."""
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, (sequence.priority, sequence.number, sequence))
        self._num_waiting += 1

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its row and blocks. Called once a sequence."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is Status.WAITING:
            self._num_waiting -= 1
        sequence.status = Status.FINISHED
        if len(self._waiting) > 2 * self._num_waiting + 64:
            # Most entries have ended, and may stay below the top for as long as something more urgent waits.
            self._waiting = [entry for entry in self._waiting if entry[2].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def abandon(self) -> None:
        """Forget every sequence; nothing can be scheduled afterwards."""
        self.running, self._waiting, self._num_waiting = [], [], 0

    def register_outputs(self, sequence: Sequence) -> None:
        """Tell the prefix cache of blocks that have filled up with tokens that are known by now."""
        full = min(sequence.num_computed, sequence.num_known) // self._block_size
        if self._prefix_cache and full > sequence.num_registered:
            digests = sequence.extend_digests(full, self._block_size)
            for index in range(sequence.num_registered, full):
                self._allocator.register(sequence.blocks[index], digests[index])
            sequence.num_registered = full

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or ``None`` when nothing can run before an earlier step retires."""
        self._make_room_for_urgent()
        plan = StepPlan()
        prefills = StepPlan()
        budget = self._max_tokens
        # Tokens that each sequence has left to compute, as ``num_total - num_computed`` but without the calls.
        left = [len(s.prompt_ids) + len(s.output_ids) + s.in_flight - s.num_computed for s in self.running]
        decoding = left.count(1)
        block_size = self._block_size

        # One pass, best first. The list may shrink at its end while it is walked.
        index = 0
        while index < len(self.running):
            sequence, remaining = self.running[index], left[index]
            index += 1
            if remaining == 1:
                decoding -= 1
                if len(sequence.output_ids) + sequence.in_flight >= sequence.max_new_tokens:
                    continue  # its last token is in flight
                fits = sequence.num_computed < len(sequence.blocks) * block_size
                if fits or self._grow(sequence, 1, index) == 1:
                    plan.add(sequence, sequence.num_computed, 1, samples=True)
                    budget -= 1
            elif budget - decoding > 0:
                length = self._grow(sequence, min(remaining, budget - decoding), index)
                if length > 0:
                    self._add_prefill(prefills, sequence, length)
                    budget -= length
        for sequence in plan.sequences:
            sequence.num_computed += 1
        plan.num_decode = len(plan.sequences)

        penalty_room = self._max_penalty_tokens
        while budget > 0 and (admitted := self._admit(budget, penalty_room, now)) is not None:
            sequence, length = admitted
            self._add_prefill(prefills, sequence, length)
            budget -= length
            if sequence.sampling.uses_penalties:
                penalty_room -= sequence.num_known
        plan.extend(prefills)
        return plan if plan.sequences else None

    # ---------------------------------------------------------------------------------------------------- parts

    def _add_prefill(self, prefills: StepPlan, sequence: Sequence, length: int) -> None:
        """Add a row of known tokens. Its full blocks can be found at once, by rows of the same step, too: in each
        layer all keys and values of a step are stored before any row attends."""
        start = sequence.num_computed
        sequence.num_computed = start + length
        prefills.add(sequence, start, length, samples=sequence.num_computed == sequence.num_known)
        self.register_outputs(sequence)

    def _grow(self, sequence: Sequence, length: int, index: int) -> int:
        """Give ``sequence`` blocks for up to ``length`` more tokens, at the cost of those after ``index``.

        Returns how many tokens it has room for now.
        """
        blocks = sequence.blocks
        room = len(blocks) * self._block_size - sequence.num_computed
        while room < length:
            block = self._allocator.allocate()
            if block is None:
                if len(self.running) <= index:
                    break
                self._preempt(self.running[-1])
                continue
            blocks.append(block)
            room += self._block_size
        return min(room, length)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = 0
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def _peek(self) -> Sequence | None:
        while self._waiting and self._waiting[0][2].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _make_room_for_urgent(self) -> None:
        """Preempt the least urgent sequence while a strictly more urgent one waits for its row or blocks."""
        head = self._peek()
        if head is None or head.in_flight:
            return
        while self.running and self.running[-1].priority > head.priority:
            if self._free_rows and self._allocator.num_free >= self._blocks_for(head.num_known) + len(
                self.running
            ):
                return
            self._preempt(self.running[-1])

    def _admit(self, budget: int, penalty_room: int, now: float) -> tuple[Sequence, int] | None:
        """Move the best waiting sequence into the batch, or ``None`` when it does not fit now.

        All blocks for its known tokens must be free, and one more for each running sequence, so that an admission
        is not followed at once by a preemption. Nothing overtakes it: a large request is not starved by small ones.
        """
        sequence = self._peek()
        # A preempted sequence keeps the token it has in flight, and comes back when that has retired.
        if sequence is None or not self._free_rows or sequence.in_flight:
            return None
        if sequence.sampling.uses_penalties and sequence.num_known > penalty_room:
            return None
        shared: list[int] = []
        if self._prefix_cache:
            # At least one token stays to be computed: its logits are needed.
            count = (sequence.num_known - 1) // self._block_size
            shared = self._allocator.match(sequence.extend_digests(count, self._block_size))
        needed = self._blocks_for(sequence.num_known) - len(shared)
        if self.running and self._allocator.num_free < needed + len(self.running):
            self._allocator.release(shared)
            return None
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        hit = len(shared) * self._block_size
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
            sequence.handle.started = True
            sequence.cached_tokens = hit
            self.prompt_tokens += len(sequence.prompt_ids)
            self.cached_tokens += hit
        sequence.blocks = shared
        sequence.num_registered = len(shared)
        sequence.num_computed = hit
        sequence.row = self._free_rows.pop()
        sequence.row_filled = False
        sequence.penalties_ready = False
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        length = self._grow(sequence, min(sequence.num_known - hit, budget), len(self.running))
        return sequence, length
