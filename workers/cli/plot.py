"""Draws the throughput history into a file. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.api import ConfigurationError, RequestError

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
    places = list(range(len(rows)))
    line = by in ("hour", "day", "night")
    panels = {
        title: series
        for title, series in _panels(rows).items()
        if any(value is not None for values in series.values() for value in values)
    }
    first = None
    for index, (title, series) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, index + 1, sharex=first)
        first = first or axes
        axes.set_title(title, loc="left")
        axes.grid(visible=True, axis="y", alpha=0.3)
        for number, (name, values) in enumerate(series.items()):
            numbers = [float("nan") if value is None else value for value in values]
            if line:
                axes.plot(places, numbers, label=name, marker="." if len(rows) < 60 else None)
            else:
                width = 0.8 / len(series)
                shift = (number - (len(series) - 1) / 2) * width  # together they stand around the tick
                axes.bar([place + shift for place in places], numbers, width=width, label=name)
        if len(series) > 1:
            axes.legend()
        axes.set_ylim(bottom=0)
        every = max(1, -(-len(rows) // _LABELS))
        axes.set_xticks(places[::every], [row.key or "-" for row in rows[::every]], rotation=45, ha="right")
        axes.tick_params(labelbottom=index == len(panels) - 1)
    figure.suptitle(f"Tokenmill throughput by {by}" + (" (UTC)" if line else ""))
    figure.savefig(path)


def _panels(rows: list[ThroughputRow]) -> dict[str, dict[str, list[float | None]]]:
    return {
        "new tokens a second": {"tok/s": [row.tokens_per_s for row in rows]},
        "latency, seconds": {
            "p50": [row.latency_p50_s for row in rows],
            "p95": [row.latency_p95_s for row in rows],
        },
        "share of the time that devices computed": {"active": [row.active_fraction for row in rows]},
    }


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigurationError(
            "--plot: matplotlib is not installed. Run: pip install 'tokenmill[plot]'"
        ) from exc
    return Figure
