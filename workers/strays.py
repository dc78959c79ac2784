"""Jobs that the database says run here, and that nothing here runs.

No claim is meant to leave one behind. But where an answer got lost for good, or the database refused even the end of a
run, the row would stay ``running`` for as long as this worker lives, and every delivery of it would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from celery.utils.log import get_logger

from models_db.claims import ReleaseItem
from models_db.faults import summary
from workers.actor import Actor
from workers.runs import Store

logger = get_logger(__name__)


class Strays:
    """Hands back what is found in two looks in a row. Owned by the delivery table's thread.

    Args:
        held: ids of all jobs that run here, or are being claimed.
        announce: has messages of these jobs published, so that they run again.
    """

    def __init__(
        self,
        actor: Actor,
        store: Store,
        held: Callable[[], Collection[str]],
        announce: Callable[[Sequence[str]], None],
    ) -> None:
        self._actor = actor
        self._store = store
        self._held = held
        self._announce = announce
        self._seen: set[tuple[str, int]] = set()
        self._releasing: set[tuple[str, int]] = set()

    def look(self, owned: Mapping[str, int]) -> None:
        """Take note of the jobs that this worker owns, with their attempts, as a look at the database found them.

        A look may be older than what has happened here since. So it takes two, and the release is fenced besides.
        """
        held = self._held()
        strays = {(job_id, attempt) for job_id, attempt in owned.items() if job_id not in held}
        for stray in sorted((strays & self._seen) - self._releasing):
            job_id, attempt = stray
            self._releasing.add(stray)
            item = ReleaseItem(job_id, attempt, error="no run of this worker has it")
            self._actor.when(self._store.release(item), partial(self._on_released, stray))
        self._seen = strays

    def _on_released(self, stray: tuple[str, int], future: Future[bool]) -> None:
        self._releasing.discard(stray)
        job_id, attempt = stray
        if error := future.exception():
            logger.error("Job %s runs nowhere and is not released yet: %s", job_id, summary(error))
        elif future.result():
            logger.error("Attempt %d of job %s ran nowhere; the job is queued again", attempt, job_id)
            self._announce([job_id])
