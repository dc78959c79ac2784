"""``tokenmill top``: the fleet as it works."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.common import DatabaseOption, console, database, settings_from
from workers.cli.durations import bounded
from workers.cli.stats import number, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from models_db.fleet_now import FleetNow

_REMEMBERED = 60  # looks in the sparkline
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

    Ctrl-C ends it, with exit status 0.

    [bold]Examples[/bold]

      tokenmill top

      tokenmill top --once
    """
    from models_db.fleet_now import look
    from models_db.session import reading

    bounded(interval, "--interval", _SHORTEST_S, _LONGEST_S, "seconds")
    out = console()
    course: deque[float | None] = deque(maxlen=_REMEMBERED)
    settings = settings_from(database_url=database_url)
    with database(settings) as engine:

        def frame() -> RenderableType:
            with reading(engine) as connection:
                now = look(connection, settings.dead_after_s)
            course.append(now.tokens_per_s)
            return picture(now, list(course))

        if once or not out.is_terminal:
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


def picture(now: FleetNow, course: list[float | None]) -> RenderableType:
    """One look, as people read it."""
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
        parts.append(f"tok/s {sparkline(course)}")
    if now.workers:
        parts.append(_workers(now))
    if len(now.workers) == now.silent:
        parts.append("No worker is alive. Start one: tokenmill worker")
    if now.queued:
        parts.append(_queues(now))
    if now.batches:
        parts.append(_batches(now))
    return Group(*parts)


def _table(*left: str, right: tuple[str, ...] = ()) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*left, box=SIMPLE, pad_edge=False)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _workers(now: FleetNow) -> Table:
    from rich.markup import escape

    table = _table(
        "worker", "device", "model", "state", right=("running", "waiting", "tok/s", "active", "cache", "beat")
    )
    for each in now.workers:
        one = each.worker
        table.add_row(
            escape(one.name),
            escape(one.device),
            escape(one.model),
            f"[red]silent {_age(one.silent_s)}[/red]" if each.silent else str(one.state),
            f"{each.running}/{one.slots}",
            f"{each.waiting}",
            number(each.tokens_per_s, 1),
            _percent(each.active),
            _percent(each.kv_used),
            f"{_age(one.silent_s)} ago",
        )
    return table


def _queues(now: FleetNow) -> Table:
    from rich.markup import escape

    table = _table("queue", right=("queued", "oldest"))
    for queue, jobs, oldest in now.queued:
        table.add_row(escape(queue), f"{jobs:,}", _age((now.at - oldest).total_seconds()))
    return table


def _batches(now: FleetNow) -> Table:
    from rich.markup import escape

    table = _table("batch", "state", right=("done", "of", "failed", "since"))
    for batch in now.batches:
        failed = batch.failed + batch.expired
        table.add_row(
            escape(batch.name),
            batch.state,
            f"{batch.succeeded + batch.cancelled + failed:,}",
            "?" if batch.total is None else f"{batch.total:,}",
            f"{failed:,}",
            _age((now.at - batch.created_at).total_seconds()),
        )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _age(seconds: float) -> str:
    """``45s``, ``12m``, ``3.5h`` or ``2.1d``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f}s"
    if seconds < 7200:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172_800 else f"{seconds / 86_400:.1f}d"
