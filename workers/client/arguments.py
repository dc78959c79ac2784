"""What a client is made with and given, where it is not even of the right type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backend.api import ConfigurationError, RequestError
from backend.errors import short_repr
from workers.settings import Settings


def checked_list(requests: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The requests, where they are several.

    Raises:
        RequestError: it is a single one, or no list at all.
    """
    given: object = requests
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError(
            "must be a list of requests",
            field="requests",
            value=type(given).__name__,
            fix='Give [{"prompt": …, "max_tokens": …}, …], also for a single one',
        )
    return requests


def check_arguments(settings: object, addresses: Mapping[str, object]) -> None:
    """What a client is made with.

    Raises:
        ConfigurationError: names what is of another type.
    """
    if not isinstance(settings, Settings | None):
        raise ConfigurationError(
            f"settings: must be what load_settings() gives, not {type(settings).__name__}. "
            "An address goes to broker_url= or database_url="
        )
    for name, address in addresses.items():
        if not isinstance(address, str | None):
            raise ConfigurationError(
                f"{name}: must be a URL as text, not {type(address).__name__}. Leave it out to use the settings'"
            )


def checked_size(threads: Any) -> int:
    """How many threads there are to be.

    Raises:
        ConfigurationError: it is no whole number above 0.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigurationError(
            f"threads: must be a whole number above 0 (got {short_repr(threads)}). Leave it out, or give one"
        )
    return threads
