"""Tables in a terminal of any width: a number is shown whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHORTEST_NAME = 8
_GAPS = (3, 1)  # columns of the terminal between two of the table


@dataclass(frozen=True, slots=True)
class Column:
    """A column, by what may become of it where there is little room."""

    title: str
    kind: Literal["number", "word", "name"] = "number"  # a name may be cut, and only that
    keep: int = 9  # those with less go first


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Table:
    """The rows, whose cells are Rich's markup; what is left out is said beneath.

    Args:
        width: of the terminal; ``None`` where nothing is to be cut, such as in a pipe.
    """
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    cells = [[Text.from_markup(cell) for cell in row] for row in rows]
    shown, gap = list(range(len(columns))), _GAPS[0]
    if width is not None:
        least = [
            _least(column, [row[index].cell_len for row in cells]) for index, column in enumerate(columns)
        ]
        while True:
            fits = [
                gap for gap in _GAPS if 2 + sum(least[n] for n in shown) + gap * (len(shown) - 1) <= width
            ]
            gap = fits[0] if fits else _GAPS[-1]
            if fits or len(shown) == 1:
                break
            # Of those that matter least, the last one.
            shown.remove(min(reversed(shown), key=lambda n: columns[n].keep))
    left_out = [column.title for index, column in enumerate(columns) if index not in shown]
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        padding=(0, (gap - 1) // 2),
        caption=f"no room for: {', '.join(left_out)}" if left_out else None,
        caption_justify="left",
    )
    for index in shown:
        column = columns[index]
        number = column.kind == "number"
        table.add_column(column.title, justify="right" if number else "left", no_wrap=column.kind != "name")
    for row in cells:
        for index in shown:
            if width is not None:
                row[index].no_wrap, row[index].overflow = True, "ellipsis"
        table.add_row(*(row[index] for index in shown))
    return table


def width_of(console: Console) -> int | None:
    """How wide a table may be there."""
    return console.width if console.is_terminal else None


def _least(column: Column, lengths: Sequence[int]) -> int:
    longest = max([len(column.title), *lengths])
    return min(longest, max(_SHORTEST_NAME, len(column.title))) if column.kind == "name" else longest
