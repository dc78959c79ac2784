"""Draws the throughput history into a file. Needs the extra ``plot``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.api import ConfigurationError, RequestError
from workers.cli.course import TIMES, over_time, panels
from workers.cli.names import plain

if TYPE_CHECKING:
    from models_db.queries import ThroughputRow

_LABELS = 24  # more would not be readable


def check_plot(path: Path) -> None:
    """Whether such a file can be drawn, asked before anything is read.

    Raises:
        RequestError: it is neither .png nor .svg, or its folder does not exist.
        ConfigurationError: matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise RequestError(
            "must be a .png or .svg file", field="--plot", value=str(path), fix="For example nights.svg"
        )
    if not path.absolute().parent.is_dir():
        raise RequestError("lies in no folder", field="--plot", value=str(path), fix="Make the folder first")
    _figure_class()


def draw(path: Path, rows: list[ThroughputRow], by: str) -> None:
    """Tokens a second, latency and activity, one above the other: lines over time, else bars."""
    figure = _figure_class()(figsize=(10, 8), layout="constrained")
    line = by in TIMES
    entries = over_time(rows, by) if line else [(row.key, row) for row in rows]
    names = [plain(key) for key, _ in entries]
    places = list(range(len(entries)))
    drawn = {
        title: series
        for title, series in panels([row for _, row in entries]).items()
        if any(value is not None for values in series.values() for value in values)
    }
    first = None
    for index, (title, series) in enumerate(drawn.items()):
        axes = figure.add_subplot(len(drawn), 1, index + 1, sharex=first)
        first = first or axes
        axes.set_title(title, loc="left")
        axes.grid(visible=True, axis="y", alpha=0.3)
        for number, (name, values) in enumerate(series.items()):
            numbers = [float("nan") if value is None else value for value in values]
            if line:
                axes.plot(places, numbers, label=name, marker=".", markersize=6 if len(places) < 60 else 2)
            else:
                width = 0.8 / len(series)
                shift = (number - (len(series) - 1) / 2) * width  # together they stand around the tick
                axes.bar([place + shift for place in places], numbers, width=width, label=name)
        if len(series) > 1:
            axes.legend()
        axes.set_ylim(bottom=0)
        every = max(1, -(-len(places) // _LABELS))
        # Names are no formulas, whatever is in them.
        axes.set_xticks(places[::every], names[::every], rotation=45, ha="right", parse_math=False)
        axes.tick_params(labelbottom=index == len(drawn) - 1)
    figure.suptitle(f"Tokenmill throughput by {by}" + (" (UTC)" if line else ""))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # an empty box stands for it
        figure.savefig(path)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigurationError(
            "--plot: matplotlib is not installed. Run: pip install 'tokenmill[plot]'"
        ) from exc
    return Figure
