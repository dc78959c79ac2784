"""Which secrets sign what: those of the receiver's host, else those that are for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from workers.callbacks.signing import SECRET_PREFIX, key_of
from workers.callbacks.urls import CallbackUrl, HostRule


@dataclass(frozen=True, slots=True, repr=False)
class SecretBook:
    """Secrets in the order in which they were given, each for one entry of hosts or for all."""

    entries: tuple[tuple[HostRule | None, str], ...]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """``whsec_…`` for all hosts, ``hooks.example.com=whsec_…`` for those.

        Raises:
            ValueError: a secret is none, or a host is none; no secret is in the message.
        """
        found: list[tuple[HostRule | None, str]] = []
        for entry in entries:
            rule, secret = None, entry
            host, equals, rest = entry.partition("=")
            if equals and rest.startswith(SECRET_PREFIX):
                if host.startswith(SECRET_PREFIX):  # must not become a host, which would be shown
                    raise ValueError("holds two secrets in one entry. Put a comma between them")
                rule, secret = HostRule.parse(host), rest
            key_of(secret)
            found.append((rule, secret))
        return cls(tuple(found))

    def of(self, url: CallbackUrl) -> list[str]:
        """What signs a callback to this URL; empty where there is nothing for it."""
        own = [secret for rule, secret in self.entries if rule is not None and rule.allows(url)]
        return own or [secret for rule, secret in self.entries if rule is None]
