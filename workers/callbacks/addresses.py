"""Which addresses a callback may be sent to: only those that the whole internet could send to as well.

The sender looks a host's addresses up itself, checks every one of them, and connects to one that it has checked: a name
that resolves to something else a moment later (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from backend.api import TokenmillError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes host and port, gives addresses as text in the order in which to try them."""

# Beyond what ``is_global`` of Python 3.11 knows.
_NOT_PUBLIC_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
_NOT_PUBLIC_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")  # all that is assigned to hosts of the internet
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

# What ``allow_private`` spares; all else that is not public stays refused, such as other ways to write an IPv4 address.
_PRIVATE_V4 = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"))
)
_PRIVATE_V6 = (ipaddress.IPv6Network("fc00::/7"),)

# Where clouds answer their hosts with credentials and the like, beside the link-local 169.254.169.254: within private
# networks, and with 168.63.129.16 among the public ones.
_CLOUD_V4 = tuple(map(ipaddress.IPv4Network, ("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32")))
_CLOUD_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        ("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
    )
)


class RefusedAddressError(TokenmillError):
    """The host of a callback has an address that callbacks may not be sent to."""

    code = "refused_address"


async def resolve(host: str, port: int) -> list[str]:
    """The system's answer, without doubles.

    Each look-up has a thread of its own: one that hangs must hold up neither others nor the end of the process.

    Raises:
        OSError, UnicodeError: there is none.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(found: list[str], error: Exception | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def look_up() -> None:
        found: list[str] = []
        error: Exception | None = None
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except (OSError, UnicodeError) as exc:
            error = exc
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, found, error)

    threading.Thread(target=look_up, name="callbacks-dns", daemon=True).start()
    return await answer


def check_addresses(host: str, found: Sequence[str], allow_private: bool) -> list[str]:
    """The addresses, once each of them has been checked: one bad one among good ones refuses all.

    Raises:
        RefusedAddressError: one of them is not public, is no address at all, or there is none.
    """
    if not found:
        raise RefusedAddressError(f"{host} has no address")
    checked = []
    for text in found:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:  # with a zone it still is an address: of this link alone
            raise RefusedAddressError(f"{host} resolves to {text[:64]!r}, which is no address") from None
        if why := refusal(address, allow_private):
            raise RefusedAddressError(f"{host} resolves to {address}, which is {why}")
        checked.append(str(address))
    return checked


def refusal(address: Address, allow_private: bool) -> str | None:
    """Why nothing may be sent to this address; ``None`` when it may.

    Args:
        allow_private: spares loopback and private networks, but neither link-local addresses nor others where clouds
            keep their hosts' credentials.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "an address with a zone"
        if address.ipv4_mapped is not None:
            return "an IPv4 address in IPv6 clothes"
        if address in _NAT64:
            return refusal(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF), allow_private)
    if address.is_multicast:
        return "a multicast address"
    if address.is_unspecified:
        return "the unspecified address"
    if address.is_link_local:
        return "a link-local address"
    if _within(address, _CLOUD_V4, _CLOUD_V6):
        return "an address where a cloud keeps its hosts' credentials"
    if address.is_loopback:
        return None if allow_private else "a loopback address"
    if _public(address) or (allow_private and _within(address, _PRIVATE_V4, _PRIVATE_V6)):
        return None
    return "not a public address"


def _within(
    address: Address, v4: Sequence[ipaddress.IPv4Network], v6: Sequence[ipaddress.IPv6Network]
) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return any(address in network for network in v4)
    return any(address in network for network in v6)


def _public(address: Address) -> bool:
    if not address.is_global or address.is_reserved:
        return False
    if _within(address, _NOT_PUBLIC_V4, _NOT_PUBLIC_V6):
        return False
    return isinstance(address, ipaddress.IPv4Address) or address in _UNICAST_V6
