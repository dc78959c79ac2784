"""Celery's control commands while a worker drains: Celery itself stops to listen before it stops its pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery.utils.collections import AttributeDict
from celery.utils.functional import pass1
from celery.utils.log import get_logger
from celery.worker import control
from celery.worker.control import Panel

from workers.control import ENDING_COMMANDS

logger = get_logger(__name__)

_RETRY_S = 5.0  # between two tries to connect
_LOOK_S = 0.001
_AT_ONCE = 100

LATE = "the worker is shutting down, and only answers questions and ends jobs"


class LateCommands:
    """Listens on a connection of its own, under the worker's name. Everything here runs on the main thread.

    Args:
        consumer: Celery's, for which the commands are meant.
        clock: monotonic seconds.
    """

    def __init__(self, consumer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._consumer = consumer
        self._app = consumer.app
        self._clock = clock
        self._connection: Any = None
        self._node: Any = None
        self._next_try = 0.0
        self._running = False

    @property
    def listening(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    def run(self) -> None:
        """Do what has been asked; listens from the first call on. Whatever goes wrong is tried again later."""
        # Celery waits for a soft shutdown in a signal's handler, which may have interrupted this.
        if self._running:
            return
        self._running = True
        try:
            if self._connection is not None or self._connect():
                for _ in range(_AT_ONCE):
                    self._connection.drain_events(timeout=_LOOK_S)
        except TimeoutError:
            pass  # there is nothing more
        except Exception as exc:
            logger.warning("Control commands are not heard for now: %r", exc)
            self.close()
        finally:
            self._running = False

    def close(self) -> None:
        """Listen no more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception as exc:
                logger.debug("The connection for control commands is not closed: %r", exc)

    def _connect(self) -> bool:
        if not self._enabled or self._clock() < self._next_try:
            return False
        self._next_try = self._clock() + _RETRY_S
        consumer = self._consumer
        connection = self._app.connection_for_write()
        try:
            connection.ensure_connection(max_retries=0)
            self._node = self._app.control.mailbox.Node(
                consumer.hostname,
                handlers=late_handlers(),
                state=AttributeDict(app=self._app, hostname=consumer.hostname, consumer=consumer, tset=pass1),
                channel=connection.channel(),
            )
            self._node.listen(callback=self._on_message)
        except Exception as exc:  # whatever it is, it must not keep the worker from its shutdown
            logger.warning("Control commands are not heard for now: %r", exc)
            connection.release()
            return False
        self._connection = connection
        return True

    @property
    def _enabled(self) -> bool:
        return bool(self._app.conf.worker_enable_remote_control)

    def _on_message(self, body: Any, message: Any) -> None:
        self._app.clock.forward()
        try:
            self._node.handle_message(body, message)
        except KeyError as exc:
            logger.error("There is no control command %s", exc)
        except Exception as exc:  # such as a reply that Redis does not take
            logger.error("A control command failed: %r", exc, exc_info=True)


def late_handlers() -> dict[str, Callable[..., Any]]:
    """All commands, with refusals in the place of those that would have the worker go on in another way."""
    changing = {name for name, info in Panel.meta.items() if info.type == "control"} - ENDING_COMMANDS
    return {name: _refuse if name in changing else command for name, command in Panel.data.items()}


def _refuse(state: Any, **_: Any) -> Any:
    return control.nok(LATE)
