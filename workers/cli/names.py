"""Names that others chose, such as tenants and batches, as a terminal or a drawing can show them."""

from __future__ import annotations


def plain(name: str) -> str:
    """Without characters that a terminal would obey instead of showing them, or ``-`` where there is no name."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name) or "-"


def shown(name: str) -> str:
    """The same for Rich, which would take brackets for its markup."""
    from rich.markup import escape

    return escape(plain(name))
