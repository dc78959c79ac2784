"""Which callback URLs are accepted. Checked at submission, and again by the sender with its own settings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from backend.api import RequestError

if TYPE_CHECKING:
    from workers.settings import Settings

MAX_URL = 2048
DEFAULT_PORTS = {"https": 443, "http": 80}
HOSTS_VARIABLE = "TOKENMILL_CALLBACK_HOSTS"

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces and control characters
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """A URL taken apart once, so that what was checked is what is connected to."""

    scheme: str
    host: str  # lower case; an IPv6 address without brackets
    port: int
    target: str  # path and query, as they are sent

    @property
    def netloc(self) -> str:
        """Host and port as in the header ``Host``: without the scheme's own port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """For logs: no path and no query, since either may hold a secret."""
        return f"{self.scheme}://{self.netloc}"


@dataclass(frozen=True, slots=True)
class HostRule:
    """An entry of the allow-list: a host, or with ``suffix`` everything below it; with its own port or none."""

    host: str
    port: int | None = None
    suffix: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """``hooks.example.com``, ``.example.com`` or ``localhost:8080``.

        Raises:
            ValueError: it is none of these.
        """
        fault = ValueError(
            f"{text!r} is no host. Write a name (hooks.example.com), everything below one (.example.com), "
            "either with a port (hooks.example.com:8443), and no scheme or path"
        )
        entry = text.strip().lower()
        suffix = entry.startswith(".")
        try:
            parts = urlsplit(f"//{entry.removeprefix('.')}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise fault from None
        if not host or port == 0 or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            raise fault
        if not _is_host(host) or (suffix and _address(host) is not None):
            raise fault
        return cls(host, port, suffix)

    def allows(self, url: CallbackUrl) -> bool:
        """Whether the URL's host and port are within this entry."""
        port = DEFAULT_PORTS[url.scheme] if self.port is None else self.port
        if url.port != port:
            return False
        return url.host.endswith(f".{self.host}") if self.suffix else url.host == self.host


@dataclass(frozen=True, slots=True)
class CallbackRules:
    """What the settings allow."""

    hosts: Sequence[HostRule] = ()
    allow_http: bool = False
    allow_private: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The rules of these settings."""
        return cls(
            tuple(map(HostRule.parse, settings.callback_hosts)),
            settings.callback_allow_http,
            settings.callback_allow_private,
        )


def check_callback_url(text: str, rules: CallbackRules, field: str = "callback_url") -> CallbackUrl:
    """Take a URL apart and hold it against the rules. What its name resolves to is checked when it is sent.

    Raises:
        RequestError: names the field and the fix. The URL itself, which may hold a secret, is not in it.
    """

    def refuse(problem: str, fix: str) -> RequestError:
        return RequestError(problem, field=field, fix=fix)

    if not rules.hosts:
        raise refuse(
            "is refused: callbacks are off", f"Allow its host with {HOSTS_VARIABLE}=hooks.example.com"
        )
    if len(text) > MAX_URL:
        raise refuse(f"has {len(text)} characters, more than {MAX_URL}", "Shorten it")
    if not _PRINTABLE.fullmatch(text) or "\\" in text:
        raise refuse("has characters that no URL has", "Percent-encode spaces and all that is not ASCII")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise refuse("is no URL", "Write https://hooks.example.com/path") from None
    if parts.scheme not in DEFAULT_PORTS or (parts.scheme == "http" and not rules.allow_http):
        raise refuse(
            "must begin with https://",
            "Give the receiver TLS; TOKENMILL_CALLBACK_ALLOW_HTTP=true is for development",
        )
    if "@" in parts.netloc:
        raise refuse(
            "must not hold a user or a password", "Check the signature instead, see docs/callbacks.md"
        )
    if parts.fragment or text.endswith("#"):
        raise refuse("must not have a fragment", "Leave away what follows #")
    host = (parts.hostname or "").lower()
    if not _is_host(host) or port == 0:
        raise refuse("names no host", "Write https://hooks.example.com/path")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    url = CallbackUrl(parts.scheme, host, DEFAULT_PORTS[parts.scheme] if port is None else port, target)
    if not any(rule.allows(url) for rule in rules.hosts):
        raise refuse(f"is refused: {url.netloc} is not allowed", f"Add {url.netloc} to {HOSTS_VARIABLE}")
    if (address := _address(host)) is not None:
        from workers.callbacks.addresses import refusal

        if why := refusal(address, rules.allow_private):
            raise refuse(f"is refused: {host} is {why}", "Name a host with a public address")
    return url


def _is_host(host: str) -> bool:
    """A name of plain labels, or an address; not ``127.1`` or ``0x7f000001``, which some resolvers take for one."""
    if _address(host) is not None:
        return True
    if len(host) > 253 or not _NAME.fullmatch(host):
        return False
    return not _NUMBER.fullmatch(host.rpartition(".")[2])


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
