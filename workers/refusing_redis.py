"""A Redis that answers and takes nothing counts as away.

A full one, one that has just become a replica, or one that still loads its file answers every command with an error.
To redis-py that is the command's own fault, and so kombu gives up and Celery stores no result. But nothing is wrong
with the command: the same one succeeds as soon as Redis is well again, or where the next connection leads.
"""

from __future__ import annotations

from typing import Any

import redis

SOCKET_TIMEOUT_S = 5.0
"""The longest wait for an answer. A connection can die without a word: its host vanished, or a router forgot it."""

HEALTH_CHECK_S = 5
"""Between two looks whether a connection that only waits still lives."""

_CODES = frozenset(
    {
        "OOM",
        "READONLY",
        "UNBLOCKED",
        "LOADING",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "TRYAGAIN",
        "MISCONF",  # it cannot write its file, and is told to take nothing then
        "NOREPLICAS",
        "BUSY",  # with someone's script
    }
)
_KINDS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.BusyLoadingError,
)


class RefusedError(redis.ConnectionError):
    """Redis is there, but takes nothing now, whoever asks."""


def refuses(error: BaseException) -> bool:
    """Whether Redis answered so because of its own state."""
    if isinstance(error, _KINDS):
        return True
    if not isinstance(error, redis.ResponseError):
        return False
    # Before Redis 7 an error within a script comes with words around it: "... -OOM command not allowed ...".
    words = str(error).split()
    return bool(words) and (
        words[0] in _CODES or any(word[0] == "-" and word[1:] in _CODES for word in words)
    )


class _Refusals:
    """Mixed into a connection class of redis-py."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """As redis-py's; raises ``RefusedError`` where Redis takes nothing."""
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except redis.ResponseError as exc:
            if refuses(exc):
                raise RefusedError(str(exc)) from exc
            raise


def noticing_refusals(connection_class: type[Any]) -> type[Any]:
    """This class of connections, to which refusals are lost connections."""
    if issubclass(connection_class, _Refusals):
        return connection_class
    return type(connection_class.__name__, (_Refusals, connection_class), {})
