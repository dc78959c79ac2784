"""The Celery application of a worker: JSON only, late acknowledgement, short leases, results in Redis.

Client programs need none of this: any language can send ``tokenmill.generate`` (see ``workers.payload``).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu import Connection, Queue

from workers.control import register_commands
from workers.leases import Leases
from workers.payload import queue_for
from workers.refusing_redis import HEALTH_CHECK_S, SOCKET_TIMEOUT_S
from workers.results import OVERRIDES
from workers.settings import Settings
from workers.tasks import GenerateTask
from workers.transport import with_leases

if TYPE_CHECKING:
    from celery.apps.worker import Worker

POOL = "workers.pool:EnginePool"
WORKER = "workers.worker:TokenmillWorker"
CONSUMER = "workers.consumer:TokenmillConsumer"


class TokenmillApp(Celery):  # type: ignore[misc]
    """A Celery application that knows its settings."""

    settings: Settings
    task_cls = "workers.tasks:QuietTask"
    control_cls = "workers.neighbours:NeighbourControl"

    @cached_property
    def Worker(self) -> type[Worker]:  # noqa: N802 - Celery's name
        """The class of worker processes."""
        made: type[Worker] = self.subclass_with_self(WORKER)
        return made

    def connection_for_read(self, url: str | None = None, **options: Any) -> Connection:
        """A connection to consume from."""
        return with_leases(super().connection_for_read(url, **options))


def make_app(settings: Settings) -> TokenmillApp:
    """Build the application. Nothing is connected, loaded or made current yet."""
    app = TokenmillApp("tokenmill", set_as_current=False)
    app.settings = settings
    app.conf.update(celery_config(settings))
    app.loader.override_backends = OVERRIDES
    app.register_task(GenerateTask())
    app.steps["consumer"].add(Leases)
    register_commands()
    return app


def celery_config(settings: Settings) -> dict[str, Any]:
    """Celery's configuration. What it says beyond names and URLs is what delivery rests on."""
    queue = queue_for(settings.model)
    expires = settings.result_expires_s or None
    return {
        "broker_url": settings.broker_url,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # for ever: running jobs go on meanwhile
        "broker_transport_options": transport_options(settings),
        "result_backend": settings.celery_result_backend_url,
        "result_expires": expires,
        "redis_socket_timeout": SOCKET_TIMEOUT_S,
        "redis_socket_connect_timeout": SOCKET_TIMEOUT_S,
        "redis_socket_keepalive": True,
        "redis_backend_health_check_interval": HEALTH_CHECK_S,
        "result_serializer": "json",
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_default_queue": queue,
        "task_queues": [Queue(queue)],
        "task_acks_late": True,
        # Only Celery's prefork pool can tell a lost child from a failure; a single-process worker that dies is
        # covered by redelivery. Set all the same, for the tasks of other people that such a worker may run.
        "task_reject_on_worker_lost": True,
        "worker_soft_shutdown_timeout": settings.soft_shutdown_s,
        "task_send_sent_event": False,
        "task_track_started": settings.track_started,
        "worker_pool": POOL,
        "worker_consumer": CONSUMER,
        "worker_concurrency": settings.engine_config.max_num_seqs,
        "worker_prefetch_multiplier": 1,  # Leases adds the headroom
        "worker_enable_prefetch_count_reduction": False,
        # Jobs outlive a lost connection: they finish and commit, and the new delivery joins or finds the result.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # SQL says what has run already.
        "worker_deduplicate_successful_tasks": False,
        "worker_send_task_events": settings.task_events,
        "imports": settings.worker_imports,
    }


def transport_options(settings: Settings) -> dict[str, Any]:
    """Options of kombu's Redis transport: leases that end soon are looked for each second."""
    return {
        "visibility_timeout": settings.visibility_timeout_s,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker killed while it restores must not keep the others from it for the default five minutes.
        "unacked_mutex_expire": max(2, math.ceil(settings.visibility_timeout_s)),
        "socket_keepalive": True,
        # Without limits the main thread waits for ever on a connection whose other end has vanished. Blocking pops
        # end after a second by themselves; one that is overdue is found by the health check.
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
    }
