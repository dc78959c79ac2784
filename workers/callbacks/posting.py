"""One request to a receiver: to an address that was checked, with TLS for the name, and within limits.

httpcore follows no redirects and looks for no proxies in the environment, so neither can lead a request astray.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.api import ConfigurationError
from workers.callbacks.addresses import RefusedAddressError, Resolve, check_addresses, resolve
from workers.callbacks.schedule import Answer, retry_after
from workers.callbacks.urls import CallbackUrl

try:
    import httpcore2 as httpcore
except ImportError as exc:
    raise ConfigurationError(
        "callbacks are switched on (TOKENMILL_CALLBACK_HOSTS), and the library that sends them is not installed. "
        "Run: pip install 'tokenmill[callbacks]', or set TOKENMILL_CALLBACK_SENDER=false where another host sends"
    ) from exc

MAX_RESPONSE_BYTES = 16_384  # read for politeness, and thrown away
MAX_RESPONSE_S = 1.0
MOST_ADDRESSES = 4
CONNECT_TIMEOUT_S = 5.0


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that it has looked up and checked itself; TLS and ``Host`` keep the name."""

    def __init__(
        self,
        *,
        allow_private: bool = False,
        resolve: Resolve = resolve,
        inner: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._inner = inner or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection to the first of the host's addresses that takes one.

        ``timeout`` is for all of it, from the look-up on. Each address may take its share of what is left, so that one
        that does not answer leaves time to the next.

        Raises:
            RefusedAddressError: an address of the host is not one that may be connected to.
            httpcore.ConnectError, httpcore.ConnectTimeout: none answers.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                found = await self._resolve(host, port)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"{host} could not be looked up in time") from None
        except (OSError, UnicodeError) as exc:
            raise httpcore.ConnectError(f"{host} cannot be looked up ({exc})") from exc
        addresses = check_addresses(host, found, self._allow_private)[:MOST_ADDRESSES]
        last: Exception | None = None
        for number, address in enumerate(addresses):
            share = None
            if deadline is not None:
                share = max(0.0, deadline - time.monotonic()) / (len(addresses) - number)
            try:
                return await self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                last = exc
        assert last is not None
        raise last

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise RefusedAddressError("callbacks are not sent to sockets of this host")

    async def sleep(self, seconds: float) -> None:
        """See httpcore."""
        await asyncio.sleep(seconds)


class Poster:
    """Sends requests, each on a connection of its own.

    Args:
        timeout_s: for a whole request, from the look-up to the answer.
        ca_file: certificates to trust instead of the system's.

    Raises:
        ConfigurationError: ``ca_file`` cannot be read.
    """

    def __init__(
        self,
        network: httpcore.AsyncNetworkBackend,
        *,
        timeout_s: float,
        ca_file: Path | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        try:
            context = (
                httpcore.default_ssl_context()
                if ca_file is None
                else ssl.create_default_context(cafile=ca_file)
            )
        except OSError as exc:  # ssl.SSLError is one
            raise ConfigurationError(
                f"callback_ca_file (TOKENMILL_CALLBACK_CA_FILE): cannot read {ca_file} ({exc}). "
                "Name a file of PEM certificates"
            ) from exc
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context = context
        self._network = network

    async def post(self, url: CallbackUrl, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send one request. What goes wrong on the way is an answer, too, never an exception."""
        came: list[Answer] = []  # once its head is there an answer counts, whatever becomes of its body
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post(url, headers, body, came)
        except TimeoutError:
            return came[0] if came else Answer(error=f"no answer within {self._timeout_s:g} s")
        except RefusedAddressError as exc:
            return Answer(error=str(exc), refused=True)
        except httpcore.TimeoutException as exc:
            return came[0] if came else Answer(error=_words(exc, "timed out"))
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as exc:
            return came[0] if came else Answer(error=_words(exc, "the connection failed"))
        return came[0]

    async def _post(
        self, url: CallbackUrl, headers: Mapping[str, str], body: bytes, came: list[Answer]
    ) -> None:
        sent: dict[str, str] = {
            "host": url.netloc,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": "tokenmill",
            "accept": "*/*",
            "connection": "close",
        }
        sent.update(headers)
        connect_s = min(CONNECT_TIMEOUT_S, self._timeout_s)
        timeouts = {"connect": connect_s, "read": self._timeout_s, "write": self._timeout_s}
        request = httpcore.Request(
            b"POST",
            httpcore.URL(
                scheme=url.scheme.encode(),
                host=url.host.encode("ascii"),
                port=url.port,
                target=url.target.encode("ascii"),
            ),
            headers=[(name.encode("ascii"), value.encode("ascii")) for name, value in sent.items()],
            content=body,
            extensions={"timeout": timeouts},
        )
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._context, network_backend=self._network, max_keepalive_connections=0
        ) as pool:
            response = await pool.handle_async_request(request)
            try:
                found = {name.lower(): value for name, value in response.headers}
                asked = found.get(b"retry-after", b"").decode("latin-1") or None
                now = datetime.fromtimestamp(self._now(), UTC)
                came.append(Answer(response.status, retry_after_s=retry_after(asked, now)))
                await self._skip(response)
            finally:
                await response.aclose()

    async def _skip(self, response: Any) -> None:
        """Read a little of the body, so that the receiver need not see a broken connection."""
        read = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_RESPONSE_S):
                async for block in response.aiter_stream():
                    read += len(block)
                    if read >= MAX_RESPONSE_BYTES:
                        return


def _words(exc: Exception, otherwise: str) -> str:
    """The error on one short line."""
    line = str(exc).strip().split("\n")[0][:300]
    return line or otherwise
