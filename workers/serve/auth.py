"""Who is calling: API keys, and what protects a service without any."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import Request

from models_db import keys
from models_db.session import reading
from workers.client import Client
from workers.serve.errors import ApiError

_KNOWN_FOR_S = 10.0  # so long a revoked key may still work
_MOST_KNOWN = 10_000
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address or name."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_cross_site(request: Request) -> bool:
    """Whether a browser sends this for a page that the service itself has not served; programs do not say."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")  # of browsers that do not send the other
    return origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()


class Gate:
    """Finds the tenant of a request.

    Args:
        open_to_all: nobody has to show a key. Only for services that this machine alone can reach.
    """

    def __init__(
        self, client: Client, *, open_to_all: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._open = open_to_all
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}  # digest of the key → tenant, until when

    async def tenant(self, request: Request) -> str | None:
        """The caller's tenant; ``None`` where no key is asked for.

        Raises:
            ApiError: 401 without a valid key; 403 when a web page of another site is calling.
        """
        if self._open:
            # Another site's page can point its own name at this machine; it cannot choose the header.
            if not is_loopback(request.url.hostname or ""):
                raise ApiError(
                    403, "only this machine may call a service without keys", kind="invalid_request_error"
                )
            if request.method not in _SAFE_METHODS and is_cross_site(request):
                raise ApiError(
                    403,
                    "a page of another site may not call a service without keys. Call it from a program, or make a "
                    "key with `tokenmill keys create TENANT`",
                    kind="invalid_request_error",
                    code="cross_site_request",
                )
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401,
                "give an API key: Authorization: Bearer tm_…",
                kind="authentication_error",
                code="missing_api_key",
            )
        digest = keys.digest_of(key.strip())
        tenant, until = self._known.get(digest, ("", 0.0))
        if self._clock() < until:
            return tenant
        found = await asyncio.to_thread(self._look_up, key.strip())
        if found is None:
            self._known.pop(digest, None)
            raise ApiError(
                401,
                "this API key is not valid: it is wrong, or was revoked",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[digest] = (found, self._clock() + _KNOWN_FOR_S)
        return found

    def _look_up(self, key: str) -> str | None:
        with reading(self._client.engine()) as conn:
            record = keys.find_key(conn, key)
        return None if record is None else record.tenant
