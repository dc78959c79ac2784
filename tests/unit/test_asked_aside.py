"""What a worker asks beside the thread that claims, because it takes the longer, the more jobs there are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from models_db.rollups import advance_aside
from models_db.sweeping import queued_count, queued_page
from workers.incarnation import Incarnation, new_worker
from workers.settings import load_settings
from workers.sweeper import Sweeper


class Recorded:
    """A thread of the database that is asked things, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Future[Any]]] = []

    def call(self, work: Any) -> Future[Any]:
        self.asked.append((work.func if isinstance(work, partial) else work, Future()))
        return self.asked[-1][1]

    submit = heartbeat = sample = call

    def works(self) -> list[Any]:
        return [work for work, _ in self.asked]

    def answer(self, value: Any) -> None:
        self.asked[-1][1].set_result(value)


class Queue:
    """A queue from which messages are missing."""

    elected = 0

    def elect(self, candidate: str, lease_s: float) -> bool:
        self.elected += 1
        return True

    def length(self) -> int:
        return 0

    def held_ids(self) -> set[str]:
        return set()

    def dead_letters(self, limit: int) -> list[bytes]:
        return []

    def close(self) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.store, self.looks, self.queue = Recorded(), Recorded(), Queue()
        self.sweeper = Sweeper(
            self.store,
            self.queue,  # type: ignore[arg-type]
            "w",
            "q",
            looks=self.looks,
            clock=lambda: self.seconds,
        )
        self.sweeper.begin()

    def until(self, found: Callable[[], bool]) -> None:
        """Let time pass while the database thread answers all that it is asked."""
        for _ in range(20):
            if found():
                return
            self.seconds += 1.01
            self.sweeper.run_pending()
            for _, future in self.store.asked:
                if not future.done():
                    future.set_result([])
            self.sweeper.run_pending()
        pytest.fail("not within 20 s")


def test_the_sweeper_counts_and_looks_through_the_queue_aside() -> None:
    world = World()
    for _ in range(2):  # looks at which messages are missing
        asked = len(world.looks.asked)
        world.until(lambda asked=asked: len(world.looks.asked) > asked)  # type: ignore[misc]
        world.looks.answer(7)
    world.sweeper.run_pending()
    assert world.looks.works() == [queued_count, queued_count, queued_page]
    assert not {queued_count, queued_page} & set(world.store.works())


def test_a_long_count_does_not_let_the_lease_go_and_one_without_end_does() -> None:
    world = World()
    world.until(lambda: bool(world.looks.asked))
    before, began = world.queue.elected, world.seconds
    world.until(lambda: world.seconds - began > 15)
    assert world.queue.elected > before + 10
    world.until(lambda: world.seconds - began > 31)
    before = world.queue.elected
    world.until(lambda: world.seconds - began > 40)
    assert world.queue.elected == before


def test_the_roll_up_of_each_minute_is_done_aside() -> None:
    settings = load_settings(database_url="sqlite:///unused.db")
    incarnation = Incarnation(
        settings, new_worker(settings), on_cancel=lambda ids: None, on_dead=lambda error: None
    )
    db, upkeep = Recorded(), Recorded()
    incarnation._db, incarnation._upkeep = db, upkeep  # type: ignore[assignment]
    incarnation._roll_up()
    incarnation._roll_up()
    assert (upkeep.works(), db.works()) == ([advance_aside], []), "one at a time"
    upkeep.answer(True)
    assert incarnation._behind, "there is more to do"
    incarnation._roll_up()
    assert upkeep.works() == [advance_aside] * 2
