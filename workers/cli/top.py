"""``tokenmill top``: the fleet as it works."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.common import DatabaseOption, console, database, settings_from
from workers.cli.course import sparkline
from workers.cli.durations import bounded
from workers.cli.names import shown
from workers.cli.stats import number
from workers.cli.tables import Column, fitted, width_of

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console, RenderableType
    from rich.table import Table

    from models_db.fleet_now import BatchNow, FleetNow, WorkerNow

_REMEMBERED = 60  # looks in the sparkline
_FRAME = 5  # lines of a table that are no rows: its edges, its titles, and what it has no room for
_sleep = time.sleep
_SHORTEST_S, _LONGEST_S = 0.2, 3600.0  # between two looks


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(top)


def top(
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Watch the fleet: workers, how busy their devices are, tokens per second, queues, running batches.

    Ctrl-C ends it, with exit status 0. A database that goes away meanwhile is waited for.

    [bold]Examples[/bold]

      tokenmill top

      tokenmill top --once
    """
    from rich.text import Text

    from models_db.errors import DatabaseUnavailableError
    from models_db.fleet_now import look
    from models_db.session import reading

    bounded(interval, "--interval", _SHORTEST_S, _LONGEST_S, "seconds")
    out = console()
    live = out.is_terminal and not once
    course: deque[float | None] = deque(maxlen=_REMEMBERED)
    settings = settings_from(database_url=database_url)
    with database(settings) as engine:

        def frame() -> RenderableType:
            try:
                with reading(engine) as connection:
                    now = look(connection, settings.dead_after_s)
            except DatabaseUnavailableError as error:
                if not course:
                    raise
                course.append(None)
                return Text(f"{error}\nLooking again every {interval:g} s.")
            course.append(now.tokens_per_s)
            return picture(now, list(course), width_of(out), out.height if live else None)

        if not live:
            out.print(frame())
            return
        with suppress(KeyboardInterrupt):
            watch(out, frame, partial(_sleep, interval))


def watch(out: Console, frame: Callable[[], RenderableType], pause: Callable[[], object]) -> None:
    """Show one look after the other on a screen of its own, until Ctrl-C, which leaves the terminal as it was."""
    from rich.live import Live

    with Live(frame(), console=out, screen=True, auto_refresh=False) as live:
        while True:
            pause()
            live.update(frame(), refresh=True)


def picture(
    now: FleetNow, course: list[float | None], width: int | None = None, height: int | None = None
) -> RenderableType:
    """One look, as people read it, in a terminal of this size; of no height where it may be as long as it is."""
    from rich.console import Group

    queued = sum(jobs for _, jobs, _ in now.queued)
    silent = f", {now.silent} more silent" if now.silent else ""
    head = (
        f"{now.at:%Y-%m-%d %H:%M:%S} UTC   {len(now.workers) - now.silent} workers{silent}   "
        f"{now.running:,} jobs running, "
        f"{queued:,} queued   {now.tokens_per_s:,.1f} tok/s"
    )
    parts: list[RenderableType] = [head]
    if len(course) > 1:
        parts.append(f"tok/s {sparkline(course, width and width - 6)}")
    none_alive = len(now.workers) == now.silent
    workers, queues, batches = _shares(now, None if height is None else height - 3 - none_alive)
    if now.workers:
        parts += _part(_workers, now, now.workers, workers, width)
    if none_alive:
        parts.append("No worker is alive. Start one: tokenmill worker")
    if now.queued:
        parts += _part(_queues, now, now.queued, queues, width)
    if now.batches:
        parts += _part(_batches, now, now.batches, batches, width)
    return Group(*parts)


def _shares(now: FleetNow, height: int | None) -> tuple[int, int, int]:
    """How many workers, queues and batches are shown, so that none of the three hides another."""
    counts = [len(now.workers), len(now.queued), len(now.batches)]
    if height is None:
        return counts[0], counts[1], counts[2]
    room = height - _FRAME * sum(count > 0 for count in counts)
    if sum(counts) <= room:
        return counts[0], counts[1], counts[2]
    queues, batches = (max(1, min(count, room // 4)) for count in counts[1:])
    taken = sum(share for share, count in zip((queues, batches), counts[1:], strict=True) if count)
    return max(1, min(counts[0], room - taken)), queues, batches


def _part(
    table: Callable[[FleetNow, Sequence[Any], int | None], Table],
    now: FleetNow,
    things: Sequence[Any],
    share: int,
    width: int | None,
) -> list[RenderableType]:
    """A table of as many as there is room for, the rest counted."""
    if share >= len(things):
        return [table(now, things, width)]
    if things is now.workers:
        things = sorted(now.workers, key=lambda each: not each.silent)  # what is wrong must not be hidden
    shown_table = table(now, things[:share], width)
    more = f"and {len(things) - share:,} more"
    shown_table.caption = f"{more}; {shown_table.caption}" if shown_table.caption else more
    shown_table.caption_justify = "left"
    return [shown_table]


def _workers(now: FleetNow, workers: Sequence[WorkerNow], width: int | None) -> Table:
    columns = [
        Column("worker", "name"),
        Column("device", "name", keep=2),
        Column("model", "name", keep=4),
        Column("state", "word", keep=7),
        Column("running"),
        Column("waiting", keep=5),
        Column("tok/s"),
        Column("active"),
        Column("cache", keep=3),
        Column("beat", keep=6),
    ]
    rows = []
    for each in workers:
        one = each.worker
        rows.append(
            [
                shown(one.name),
                shown(one.device),
                shown(one.model),
                f"[red]silent {_age(one.silent_s)}[/red]" if each.silent else str(one.state),
                f"{each.running}/{one.slots}",
                f"{each.waiting}",
                number(each.tokens_per_s, 1),
                _percent(each.active),
                _percent(each.kv_used),
                f"{_age(one.silent_s)} ago",
            ]
        )
    return fitted(columns, rows, width)


def _queues(now: FleetNow, queues: Sequence[tuple[str, int, datetime]], width: int | None) -> Table:
    columns = [Column("queue", "name"), Column("queued"), Column("oldest", keep=5)]
    rows = [
        [shown(queue), f"{jobs:,}", _age((now.at - oldest).total_seconds())] for queue, jobs, oldest in queues
    ]
    return fitted(columns, rows, width)


def _batches(now: FleetNow, batches: Sequence[BatchNow], width: int | None) -> Table:
    columns = [
        Column("batch", "name"),
        Column("state", "word", keep=4),
        Column("done"),
        Column("of"),
        Column("failed", keep=6),
        Column("since", keep=5),
    ]
    rows = []
    for batch in batches:
        failed = batch.failed + batch.expired
        rows.append(
            [
                shown(batch.name),
                batch.state,
                f"{batch.succeeded + batch.cancelled + failed:,}",
                "?" if batch.total is None else f"{batch.total:,}",
                f"{failed:,}",
                _age((now.at - batch.created_at).total_seconds()),
            ]
        )
    return fitted(columns, rows, width)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _age(seconds: float) -> str:
    """``45s``, ``12m``, ``3.5h`` or ``2.1d``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172_800 else f"{seconds / 86_400:.1f}d"
