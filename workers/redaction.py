"""Passwords out of what is shown: URLs, and texts of other libraries that hold some."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

_HIDDEN = "***"
_SECRET_QUERY = re.compile(r"pass|secret|token|key$|credential", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)(?P<user>[^\s/@:]*):(?P<password>[^\s/]*)@", re.I
)


def redact_url(url: str) -> str:
    """The URL with its password and any secret query value as ``***``; a URL without them unchanged."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return redact_text(url)
    netloc = parts.netloc
    if "@" in netloc:
        credentials, _, host = netloc.rpartition("@")
        user, colon, _ = credentials.partition(":")
        netloc = f"{user}:{_HIDDEN}@{host}" if colon else f"{user}@{host}"
    query = parts.query
    if query:
        pairs = parse_qsl(query, keep_blank_values=True)
        if any(_SECRET_QUERY.search(name) for name, _ in pairs):
            shown = [(name, _HIDDEN if _SECRET_QUERY.search(name) else value) for name, value in pairs]
            query = urlencode(shown, safe="*/:")
    if netloc == parts.netloc and query == parts.query:
        return url
    return urlunsplit(SplitResult(parts.scheme, netloc, parts.path, query, parts.fragment))


def redact_text(text: str) -> str:
    """Any text with the passwords of the URLs inside it as ``***``; for errors of other libraries."""
    return _URL_CREDENTIALS.sub(rf"\g<scheme>\g<user>:{_HIDDEN}@", text)
