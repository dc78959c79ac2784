"""The delivery table at random, without processes: whatever happens, each job ends once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from models_db.tables import JobState, Result
from tests.fleet.table_world import World


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_each_job_ends_once(world: World, engine: Engine, seed: int) -> None:
    """Random deliveries, doubled and repeated, kills, cancels, revokes, shutdowns and database outages."""
    dice = random.Random(seed)
    jobs = [f"job-{n}" for n in range(12)]
    queue = jobs * 2
    dice.shuffle(queue)
    names = iter(f"w{n}" for n in range(1000))

    def start() -> Any:
        return world.worker(next(names))

    live = [start(), start()]

    def sweep() -> None:
        """What no delivery brings any more is published again, as is what was announced."""
        queue.extend(world.published)
        world.published.clear()
        held = {request.id for worker in live for request in worker.requests if not request.ended}
        queued = {job for job, state in world.states().items() if state is JobState.QUEUED}
        queue.extend(queued - held - set(queue))

    def collect(worker: Any) -> None:
        """What was handed back is delivered again; count the terminal outcomes that Celery heard of."""
        for request in list(worker.requests):
            if request.ended:
                worker.requests.remove(request)
                if request.log[-1] in ("front", "back"):
                    queue.append(request.id)

    for _ in range(150):
        worker = dice.choice(live)
        action = dice.random()
        if action < 0.45 and queue:
            worker.deliver(queue.pop(0))
        elif action < 0.70:
            open_jobs = [job for job, handle in worker.backend.handles.items() if not handle.done()]
            if open_jobs:
                worker.backend.finish(dice.choice(open_jobs))
        elif action < 0.76:
            worker.table.cancel([dice.choice(jobs)])
        elif action < 0.80 and worker.requests:
            request = dice.choice(worker.requests)
            if not request.ended:
                worker.table.revoke(request, JobState.CANCELLED)
        elif action < 0.85:
            worker.store.away, worker.store.on_the_way = True, dice.random() < 0.5
        elif action < 0.92:
            worker.store.settle()
        elif action < 0.95:
            lost = [request.id for request in worker.kill()]
            rows = world.states()  # before it has a row, a bare message is Redis's alone
            queue += [job for job in lost if job not in rows or dice.random() < 0.5]
            live.remove(worker)
            world.bury(worker.name)
            live.append(start())
        elif action < 0.97:
            worker.store.settle()
            worker.table.close()
            worker.table.release()
            world.run()
            collect(worker)
            assert worker.table.pending == 0
            live.remove(worker)
            live.append(start())
        else:
            world.clock.seconds += dice.choice([0.5, 2, 7])
        if dice.random() < 0.7:
            world.run()
            for each in live:
                collect(each)

    for _ in range(200):
        world.clock.seconds += 2
        for worker in live:
            worker.store.settle()
            for job, handle in list(worker.backend.handles.items()):
                if not handle.done():
                    worker.backend.finish(job)
        world.run()
        for worker in live:
            collect(worker)
        sweep()
        while queue:
            dice.choice(live).deliver(queue.pop())
        ended = all(state.terminal for state in world.states().values())
        if ended and not queue and all(worker.table.pending == 0 for worker in live):
            break
    states = world.states()
    assert set(states) == set(jobs)
    assert all(state.terminal for state in states.values()), states
    for worker in live:
        assert worker.table.pending == 0
        assert worker.table.running == 0
        assert not worker.fatal
    with engine.connect() as conn:
        succeeded = [job for job, state in states.items() if state is JobState.SUCCEEDED]
        assert conn.scalar(
            select(func.count()).select_from(Result).where(Result.job_id.in_(succeeded))
        ) == len(succeeded)
    for job in jobs:
        terminal = [outcome for outcome in world.attempts(job) if outcome not in ("lost", "released", None)]
        assert len(terminal) <= 1, f"{job} was committed {len(terminal)} times"
