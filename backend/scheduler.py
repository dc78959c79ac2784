"""Who runs in the next step: admission, chunked prefill, decode, preemption, priority.

Only lengths matter here, never token values, so a step can be planned while the one before it still computes.
The engine thread is the only caller.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from backend.blocks import BlockAllocator
from backend.config import BULK_PRIORITY
from backend.sequence import Sequence, Status
from backend.waiting import WaitingLine


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


def _held_order(held: tuple[Sequence, int]) -> tuple[int, int]:
    return _order(held[0])


def _waits(sequence: Sequence) -> bool:
    return sequence.status is Status.WAITING


def _is_bulk(sequence: Sequence) -> bool:
    return sequence.priority >= BULK_PRIORITY


class Scheduler:
    """Holds the waiting and the running sequences and plans steps over them.

    The running list is kept in order of rank, so the one to preempt is always its last and a plan never has to be
    undone: whoever is scheduled first is preempted last. The best sequence therefore always advances, and every
    request that fits the cache alone terminates.

    Rank is (priority, arrival), except that the best ``min_bulk_seqs`` of the bulk sequences that run are *kept*:
    they rank before all others, so that nobody takes their rows or blocks. While fewer of them run, a row that
    becomes free goes to bulk first. As rows become free in bounded time, bulk waits for a bounded time, however
    much is urgent; and an urgent sequence is never behind more than those few. Bulk that has a row coming to it but
    lacks blocks lets urgent ones pass as long as other bulk runs. Where none does, it keeps later arrivals out until
    enough have ended, as every head of a line does, for bulk would starve otherwise.

    A step's tokens go to decode rows first, then to text by priority, whether it runs or waits. Only kept bulk has
    a share of its own in them.
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
        min_bulk_seqs: int = 0,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._max_tokens = max_num_batched_tokens
        # Known tokens of the sequences with penalties that are admitted in one step: a slot holds no more.
        self._max_penalty_tokens = sys.maxsize if max_penalty_tokens is None else max_penalty_tokens
        self._prefix_cache = prefix_cache
        self._min_bulk = min_bulk_seqs
        # Tokens of known text that kept bulk may compute in a step in which urgent text waits to be computed.
        self._bulk_tokens = max(1, max_num_batched_tokens * min_bulk_seqs // max_num_seqs)
        self._urgent: WaitingLine[Sequence] = WaitingLine(_waits)
        self._bulk: WaitingLine[Sequence] = WaitingLine(_waits)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.running: list[Sequence] = []
        self._num_bulk = 0  # of those that run
        self._promised: int | None = None  # see _num_promised
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, preempted ones included."""
        return len(self._urgent) + len(self._bulk)

    def waiting(self) -> Iterator[Sequence]:
        """The sequences that wait, in no order."""
        yield from self._urgent
        yield from self._bulk

    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return self.num_waiting > 0 or bool(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or preempted."""
        sequence.status = Status.WAITING
        self._line(sequence).push(sequence.priority, sequence.number, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its row and blocks. Called once a sequence."""
        before, sequence.status = sequence.status, Status.FINISHED
        if before is Status.RUNNING:
            self._leave(sequence)
        elif before is Status.WAITING:
            self._line(sequence).drop()

    def abandon(self) -> None:
        """Forget every sequence; nothing can be scheduled afterwards."""
        self.running, self._num_bulk = [], 0
        self._urgent.clear()
        self._bulk.clear()

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
        # Tokens that each sequence has left to compute, as ``num_total - num_computed`` but without the calls.
        left = [len(s.prompt_ids) + len(s.output_ids) + s.in_flight - s.num_computed for s in self.running]
        self._make_room(left)
        plan = StepPlan()
        prefills = StepPlan()
        budget = self._max_tokens
        decoding = left.count(1)  # rows still to come whose token no text may take
        if decoding < len(left):
            decoding -= sum(map(self._is_ending, self.running))
        block_size = self._block_size
        kept = self._num_kept
        # Where urgent text waits to be computed, kept bulk's text gets a share of the step, and what that leaves.
        contended = self._min_bulk > 0 and self._has_urgent_text(left)
        allowance = self._bulk_tokens
        head = self._urgent.peek() or self._bulk.peek()
        urgency = sys.maxsize if head is None else head.priority
        # Text that runs but is less urgent than some that waits, with the tokens that are its own all the same.
        held: list[tuple[Sequence, int]] = []

        # One pass, best first. The list may shrink at its end while it is walked.
        index = 0
        while index < len(self.running):
            sequence, remaining = self.running[index], left[index]
            index += 1
            if remaining == 1:
                if len(sequence.output_ids) + sequence.in_flight >= sequence.max_new_tokens:
                    continue  # as ``_is_ending``, without the call
                decoding -= 1
                fits = sequence.num_computed < len(sequence.blocks) * block_size
                if fits or self._grow(sequence, 1, index) == 1:
                    plan.add(sequence, sequence.num_computed, 1, samples=True)
                    budget -= 1
            elif contended and index <= kept:
                length = self._grow(sequence, min(remaining, budget - decoding, allowance), index)
                held.append((sequence, length))
                allowance -= length
                budget -= length
            elif sequence.priority > urgency and index > kept:
                held.append((sequence, 0))
            elif (length := self._grow(sequence, min(remaining, budget - decoding), index)) > 0:
                self._add_prefill(prefills, sequence, length)
                budget -= length
        for sequence in plan.sequences:
            sequence.num_computed += 1
        plan.num_decode = len(plan.sequences)

        held.sort(key=_held_order)
        self._promised = None
        penalty_room = self._max_penalty_tokens
        owed = self._num_owed()  # counted here: bulk that lost its blocks to other bulk has its row coming
        reserved = 0  # rows that bulk gets in a later step
        while budget > 0 and (candidate := self._next_to_admit(owed, reserved)) is not None:
            if held and owed <= 0 and held[0][0].priority <= candidate.priority:
                budget = self._compute_held(prefills, held, budget, candidate.priority)
                continue
            if not self._is_ready(candidate, penalty_room):
                if owed <= 0:
                    break
                reserved, owed = owed, 0
                continue
            own = owed > 0 and contended
            length = self._admit(candidate, min(budget, max(1, allowance)) if own else budget, now)
            if length == 0:
                if owed <= 0 or self._num_bulk == 0:
                    break
                reserved, owed = owed, 0
                continue
            if own:
                insort(held, (candidate, length), key=_held_order)
            else:
                self._add_prefill(prefills, candidate, length)
            budget -= length
            if _is_bulk(candidate):
                owed -= 1
                allowance -= length
            if candidate.sampling.uses_penalties:
                penalty_room -= candidate.num_known
        self._compute_held(prefills, held, budget, sys.maxsize)
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

    @staticmethod
    def _is_ending(sequence: Sequence) -> bool:
        """Whether the last token of a sequence is in flight."""
        return len(sequence.output_ids) + sequence.in_flight >= sequence.max_new_tokens

    def _has_urgent_text(self, left: list[int]) -> bool:
        """Whether known tokens of urgent sequences, waiting or running, are still to be computed."""
        kept = self._num_kept
        end = len(left) - (self._num_bulk - kept)
        return len(self._urgent) > 0 or any(left[index] > 1 for index in range(kept, end))

    def _compute_held(
        self, prefills: StepPlan, held: list[tuple[Sequence, int]], budget: int, priority: int
    ) -> int:
        """Add the rows of held text up to ``priority``, with its own tokens and with what is left of the budget.

        Returns what is left then. Nobody is preempted for the tokens beyond those that are its own.
        """
        while held and held[0][0].priority <= priority:
            sequence, length = held.pop(0)
            more = min(sequence.num_known - sequence.num_computed - length, budget)
            total = self._grow(sequence, length + more, len(self.running))
            if total > 0:
                self._add_prefill(prefills, sequence, total)
            budget -= total - length
            self._promised = None
        return budget

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
        self._leave(sequence)
        self._start_over(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    @property
    def _num_kept(self) -> int:
        """How many sequences at the beginning of the running list are kept bulk."""
        return min(self._num_bulk, self._min_bulk)

    def _join(self, sequence: Sequence) -> None:
        """Insert into the running list, by rank."""
        kept = self._num_kept
        rest = len(self.running) - (self._num_bulk - kept)  # where the bulk begins that is not kept
        if not _is_bulk(sequence):
            insort(self.running, sequence, kept, rest, key=_order)
            return
        self._num_bulk += 1
        if kept < self._min_bulk:
            insort(self.running, sequence, 0, kept, key=_order)
        elif kept > 0 and _order(sequence) < _order(self.running[kept - 1]):
            self.running.insert(rest, self.running[kept - 1])
            del self.running[kept - 1]
            insort(self.running, sequence, 0, kept - 1, key=_order)
        else:
            insort(self.running, sequence, rest, key=_order)

    def _leave(self, sequence: Sequence) -> None:
        """Take out of the running list; the best of the other bulk is kept in place of one that was."""
        kept = self._num_kept
        index = self.running.index(sequence)
        del self.running[index]
        if _is_bulk(sequence):
            if index < kept < self._num_bulk:
                rest = len(self.running) - (self._num_bulk - kept)
                self.running.insert(kept - 1, self.running.pop(rest))
            self._num_bulk -= 1
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered = 0
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def _line(self, sequence: Sequence) -> WaitingLine[Sequence]:
        return self._bulk if _is_bulk(sequence) else self._urgent

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _num_owed(self) -> int:
        """How many of the free rows go to bulk before anybody else."""
        return min(len(self._free_rows), len(self._bulk), max(0, self._min_bulk - self._num_bulk))

    def _num_promised(self) -> int:
        """Blocks that the known tokens of the running sequences have still to take. Counted once a step."""
        if self._promised is None:
            missing = (self._blocks_for(s.num_known) - len(s.blocks) for s in self.running)
            self._promised = sum(count for count in missing if count > 0)
        return self._promised

    def _make_room(self, left: list[int]) -> None:
        """Preempt the least urgent while strictly more urgent ones wait for their rows or blocks.

        This goes for as many as a step can take in, counted as if no prefix were cached: what hits leave of the step,
        the next one takes. ``left`` has the tokens that each of the running has left to compute; it is cut to those
        that still run.
        """
        line = self._urgent or self._bulk
        head = line.peek()
        if head is None or not self._may_preempt(head):
            return
        owed = self._num_owed()
        rows, blocks = 0, 0
        text, penalties = self._text_before(head, owed, left), 0
        decoding = left.count(1)
        # Blocks that the running ones take before all others, as far as they have text or are at a border.
        taken = [
            self._blocks_for(s.num_computed + more) - len(s.blocks)
            for s, more in zip(self.running, left, strict=True)
        ]
        promised = sum(taken)
        if line is self._urgent:
            rows = owed
            blocks = sum(self._blocks_for(s.num_known) for s in islice(self._bulk.in_order(), owed))
        # They join a line only in the end: one of the lines is being walked.
        preempted: list[Sequence] = []
        for waiting in line.in_order():
            if waiting.sampling.uses_penalties:
                penalties += waiting.num_known
            if waiting.in_flight or penalties > self._max_penalty_tokens:
                break
            if text > 0 and text + decoding >= self._max_tokens:
                break
            rows += 1
            blocks += self._blocks_for(waiting.num_known)
            while (
                len(self._free_rows) < rows
                or self._allocator.num_free < blocks + promised + len(self.running) + rows - 1
                or decoding >= self._max_tokens
            ) and self._may_preempt(waiting):
                preempted.append(self.running[-1])
                self._leave(self.running[-1])
                decoding -= left.pop() == 1
                promised -= taken.pop()
            if not self._may_preempt(waiting):
                break
            text += waiting.num_known
        for sequence in preempted:
            self._start_over(sequence)

    def _text_before(self, head: Sequence, owed: int, left: list[int]) -> int:
        """Tokens of text that a step computes before that of ``head``, which waits."""
        kept = self._num_kept
        text = sum(left[:kept]) - left[:kept].count(1)
        if not _is_bulk(head):
            text = self._bulk_tokens if owed > 0 else min(text, self._bulk_tokens)
        for index in range(kept, len(left)):
            if left[index] > 1 and self.running[index].priority <= head.priority:
                text += left[index]
        return text

    def _may_preempt(self, head: Sequence) -> bool:
        """Whether the last of the running may be preempted for ``head``: less urgent, and not kept from it."""
        if not self.running or self.running[-1].priority <= head.priority:
            return False
        return _is_bulk(head) or not _is_bulk(self.running[-1]) or self._num_bulk > self._min_bulk

    def _next_to_admit(self, owed: int, reserved: int) -> Sequence | None:
        """Who gets the next free row beyond those reserved: bulk if that is owed to it, else the most urgent."""
        first, second = (self._bulk, self._urgent) if owed > 0 else (self._urgent, self._bulk)
        return first.peek() or second.peek() if len(self._free_rows) > reserved else None

    def _is_ready(self, sequence: Sequence, penalty_room: int) -> bool:
        """Whether a sequence can join in this step, if it fits the cache.

        A preempted one keeps the token it has in flight, and comes back when that has retired.
        """
        return not sequence.in_flight and not (
            sequence.sampling.uses_penalties and sequence.num_known > penalty_room
        )

    def _admit(self, sequence: Sequence, budget: int, now: float) -> int:
        """Move the first of a line into the batch; how many tokens it computes, 0 when it does not fit now.

        All blocks for its known tokens must be free, beside those that text of running sequences has still to take
        and one more for each of them, so that an admission is not followed at once by a preemption. Nothing overtakes
        it: a large request is not starved by small ones.
        """
        shared: list[int] = []
        if self._prefix_cache:
            # At least one token stays to be computed: its logits are needed.
            count = (sequence.num_known - 1) // self._block_size
            shared = self._allocator.match(sequence.extend_digests(count, self._block_size))
        needed = self._blocks_for(sequence.num_known) - len(shared)
        room = self._allocator.num_free - needed - len(self.running)
        if self.running and (room < 0 or room < self._num_promised()):
            self._allocator.release(shared)
            return 0
        self._line(sequence).pop()
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
        self._join(sequence)
        length = self._grow(sequence, min(sequence.num_known - hit, budget), len(self.running))
        if self._promised is not None:
            self._promised += self._blocks_for(sequence.num_known) - len(sequence.blocks)
        return length
