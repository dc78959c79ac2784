"""Ids of version 7: their bits, their order, their uniqueness."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from models_db.entropy import random_bytes
from models_db.ids import uuid7

TIMES = st.integers(0, (1 << 48) * 1_000_000 - 1)


@given(TIMES, st.binary(min_size=8, max_size=8))
def test_it_is_a_uuid_of_version_7_that_holds_its_time(nanoseconds, noise):
    value = uuid7(lambda: nanoseconds, lambda size: noise[:size])
    parsed = uuid.UUID(value)
    assert (str(parsed), parsed.version, parsed.variant) == (value, 7, uuid.RFC_4122)
    assert parsed.int >> 80 == nanoseconds // 1_000_000


@given(TIMES, TIMES)
def test_text_order_is_time_order(first, second):
    ids = [uuid7(lambda t=t: t, lambda size: b"\xff" * size) for t in sorted((first, second))]
    assert ids == sorted(ids)


def test_ids_made_at_one_moment_differ():
    assert len({uuid7(lambda: 1) for _ in range(1000)}) == 1000


def test_random_bytes_come_once_in_every_size_thread_and_fork():
    sizes = [8, 16, 1, 5000, 8, 4096, 8]
    assert [len(random_bytes(size)) for size in sizes] == sizes

    def some(_=None):
        return [random_bytes(8) for _ in range(2000)]

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"".join(random_bytes(8) for _ in range(100)))
        os._exit(0)
    os.close(writer)
    mine = some()
    with os.fdopen(reader, "rb") as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert len(theirs) == 800
    mine += [theirs[at : at + 8] for at in range(0, 800, 8)]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(some, range(4)):
            mine += found
    assert len(set(mine)) == len(mine)
