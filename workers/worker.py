"""Celery's worker, which goes on serving its pool while a soft shutdown waits."""

from __future__ import annotations

import time
from typing import Any

from celery.apps.worker import Worker
from celery.utils.log import get_logger
from celery.worker import state

logger = get_logger(__name__)

_PUMP_S = 0.1


class TokenmillWorker(Worker):  # type: ignore[misc]
    """See the module."""

    def wait_for_soft_shutdown(self) -> None:
        """Let running jobs finish for ``worker_soft_shutdown_timeout`` seconds.

        Celery sleeps here, on the main thread, which also acknowledges and renews the leases.
        """
        limit_s: float = self.app.conf.worker_soft_shutdown_timeout
        pool: Any = self.pool
        if limit_s <= 0 or not state.active_requests:
            return
        logger.warning("Soft shutdown: running jobs may finish for up to %gs", limit_s)
        end = time.monotonic() + limit_s
        while state.active_requests and time.monotonic() < end:
            pool.pump(_PUMP_S)
