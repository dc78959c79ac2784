"""The block allocator against a model in plain Python, and its particular promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.blocks import ROOT_DIGEST, BlockAllocator, BlockError, chain_digest


def chain(*tokens: int) -> list[bytes]:
    """Digests of blocks of one token each."""
    digests: list[bytes] = []
    for token in tokens:
        digests.append(chain_digest(digests[-1] if digests else ROOT_DIGEST, [token]))
    return digests


def take(allocator: BlockAllocator, count: int) -> list[int]:
    blocks = [allocator.allocate() for _ in range(count)]
    assert None not in blocks
    return [block for block in blocks if block is not None]


def cache(allocator: BlockAllocator, *tokens: int) -> list[int]:
    """Compute and release a sequence whose blocks can be found from then on."""
    blocks = take(allocator, len(tokens))
    for block, digest in zip(blocks, chain(*tokens), strict=True):
        allocator.register(block, digest)
    allocator.release(blocks)
    return blocks


def test_every_block_is_handed_out_once() -> None:
    allocator = BlockAllocator(5)
    assert sorted(take(allocator, 5)) == [0, 1, 2, 3, 4]
    assert allocator.allocate() is None
    assert allocator.num_free == 0


def test_releasing_twice_is_an_error() -> None:
    allocator = BlockAllocator(2)
    block = take(allocator, 1)[0]
    allocator.release([block])
    with pytest.raises(BlockError, match=f"block {block} was released twice"):
        allocator.release([block])
    with pytest.raises(BlockError, match="released twice"):
        BlockAllocator(2).release([1])


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    allocator = BlockAllocator(3)
    blocks = take(allocator, 1)
    allocator.register(blocks[0], chain(7)[0])
    assert allocator.match(chain(7)) == blocks
    allocator.release(blocks)
    assert allocator.num_free == 2
    allocator.check([blocks])
    allocator.release(blocks)
    assert allocator.num_free == 3
    allocator.check([])


def test_matching_stops_at_the_first_unknown_block() -> None:
    allocator = BlockAllocator(8)
    first, second = cache(allocator, 1, 2)
    assert allocator.match(chain(1, 2, 3)) == [first, second]
    assert allocator.match(chain(1, 9, 2)) == [first]
    assert allocator.match(chain(2)) == []  # the same tokens after another beginning are other contents
    assert allocator.num_free == 6
    allocator.check([[first, second], [first]])


def test_the_least_recently_used_is_evicted_first_and_chains_from_their_end() -> None:
    allocator = BlockAllocator(6)
    old = cache(allocator, 1, 2)
    new = cache(allocator, 3, 4)
    plain = take(allocator, 2)  # blocks without contents go first
    assert not set(plain) & {*old, *new}
    assert allocator.num_cached == 4
    allocator.release(allocator.match(chain(1, 2)))  # used again: now the younger
    assert take(allocator, 1) == [new[1]]
    assert take(allocator, 1) == [new[0]]
    assert take(allocator, 1) == [old[1]]
    assert allocator.match(chain(1, 2)) == [old[0]]
    assert allocator.allocate() is None


def test_the_first_block_with_some_contents_stays_the_one_that_is_found() -> None:
    allocator = BlockAllocator(4)
    first, second = take(allocator, 2)
    digest = chain(5)[0]
    allocator.register(first, digest)
    allocator.register(second, digest)
    assert allocator.match([digest]) == [first]
    allocator.release([first, first])
    allocator.release([second])
    assert take(allocator, 1) != [first]
    assert allocator.match([digest]) == [first]


def test_an_evicted_block_can_be_registered_anew() -> None:
    allocator = BlockAllocator(1)
    cache(allocator, 1)
    block = take(allocator, 1)[0]
    assert allocator.num_cached == 0
    allocator.register(block, chain(2)[0])
    allocator.release([block])
    assert allocator.match(chain(1)) == []
    assert allocator.match(chain(2)) == [block]


def test_without_the_prefix_cache_nothing_is_found() -> None:
    allocator = BlockAllocator(4, prefix_cache=False)
    cache(allocator, 1, 2)
    assert allocator.match(chain(1, 2)) == []
    assert allocator.num_cached == 0


def test_check_notices_leaks_and_miscounts() -> None:
    allocator = BlockAllocator(4)
    blocks = take(allocator, 2)
    allocator.check([blocks])
    with pytest.raises(BlockError, match="reference counts"):
        allocator.check([])
    with pytest.raises(BlockError, match="reference counts"):
        allocator.check([blocks, blocks])


def test_digests_depend_on_all_that_came_before() -> None:
    assert chain_digest(ROOT_DIGEST, [1, 2]) == chain_digest(ROOT_DIGEST, (1, 2))
    assert chain_digest(ROOT_DIGEST, [1, 2]) != chain_digest(ROOT_DIGEST, [2, 1])
    assert chain(1, 2)[1] != chain(2, 2)[1]
    assert len(chain(1)[0]) == 16


class AllocatorMachine(RuleBasedStateMachine):
    """Random use against reference counts kept in a dictionary."""

    @initialize(size=st.integers(1, 8), prefix_cache=st.booleans())
    def start(self, size: int, prefix_cache: bool) -> None:
        self.size = size
        self.prefix_cache = prefix_cache
        self.allocator = BlockAllocator(size, prefix_cache=prefix_cache)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what we last registered for a block that we hold
        self.known: dict[bytes, int] = {}

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        blocks = [self.allocator.allocate() for _ in range(count)]
        got = [block for block in blocks if block is not None]
        assert len(got) == min(count, free)
        assert not {b for held in self.held for b in held} & set(got)
        for block in got:  # whatever it held before is gone
            digest = self.contents.pop(block, None)
            if digest is not None and self.known.get(digest) == block:
                del self.known[digest]
        if got:
            self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=4, max_size=4))
    def register(self, data: st.DataObject, tokens: list[int]) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        for block, digest in zip(blocks, chain(*tokens), strict=False):
            self.allocator.register(block, digest)
            if self.prefix_cache and digest not in self.known and block not in self.contents:
                self.known[digest] = block
                self.contents[block] = digest

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def match(self, tokens: list[int]) -> None:
        wanted = []
        for digest in chain(*tokens):
            if digest not in self.known:
                break
            wanted.append(self.known[digest])
        assert self.allocator.match(chain(*tokens)) == wanted
        if wanted:
            self.held.append(wanted)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.allocator.release(self.held.pop(index))

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check(self.held)
        assert self.allocator.num_free == self.size - len({b for held in self.held for b in held})
        assert self.allocator.num_cached == len(self.known)


AllocatorMachine.TestCase.settings = settings(max_examples=80, deadline=None, derandomize=True, database=None)
TestAllocatorMachine = AllocatorMachine.TestCase
