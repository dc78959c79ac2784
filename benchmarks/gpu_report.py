"""The GPU measurement's tables, from what it keeps as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

MIB = 2**20


def works_table(works: Sequence[Mapping[str, Any]]) -> Table:
    """Speed of each work, its share of the floor, and what a step costs on either side."""
    table = Table(title="The engine (bf16, greedy, no end token; prompts of 64 tokens unless @ says more)")
    names = ("work", "ms/step", "whole s", "tok/s", "of floor", "active", "prepare ms", "busy ms", "idle ms")
    for name in names:
        table.add_column(name, justify="left" if name == "work" else "right", no_wrap=True)
    for work in works:
        steps = work["steady"] or work["all"]
        table.add_row(
            work["name"],
            _step(work),
            f"{work['whole_s']:.2f}",
            f"{work['tokens_per_s']:,.0f}",
            f"{work['floor_share']:.0%}",
            f"{steps['active']:.2%}" + ("" if work["steady"] else " *"),
            f"{steps['prepare_ms']:.3f}",
            f"{steps['busy_ms']:.3f}",
            f"{steps['idle_ms']:.3f}",
        )
    table.caption = (
        "ms/step: (whole - prefill) / (new tokens - 1); of prompts longer than 64 tokens the steady part's. active, "
        "prepare, busy, idle: of the steady part, where all requests decode; * of the whole run, prompts and the last "
        "requests' ends included."
    )
    return table


def engines_table(engines: Sequence[Mapping[str, Any]]) -> Table:
    """How each engine was made, and how long that took."""
    table = Table(title="The engines")
    for name in ("engine", "start s", "built", "graphs", "graph MiB", "KV blocks", "attention", "layers"):
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=name == "engine")
    for engine in engines:
        table.add_row(
            f"{engine['mode']}, {engine['max_num_seqs']} slots, context {engine['max_model_len']}",
            f"{engine['start_to_first_token_s']:.1f}",
            str(engine["kernels_built"]),
            str(engine.get("graphs", 0)),
            graph_mib(engine),
            str(engine["num_kv_blocks"]),
            str(engine["attention"]),
            str(engine["layers"]),
        )
    table.caption = (
        "start: until the first token; of the first engine since the process began. built: entries that Triton's cache "
        "did not hold, so that a start with many is a cold one."
    )
    return table


def sync_table(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """What the asynchronous loop is worth: pairs of one work, asynchronous and synchronous."""
    table = Table(title="Asynchronous against synchronous, batch 32")
    for name in ("work", "async", "sync", "less time", "sync active", "sync idle ms"):
        table.add_column(name, justify="left" if name == "work" else "right")
    for ours, sync in pairs:
        steps = sync["steady"] or sync["all"]
        table.add_row(
            ours["name"],
            f"{_step(ours)} ms/step",
            f"{_step(sync)} ms/step",
            f"{1 - ours['whole_s'] / sync['whole_s']:.1%}",
            f"{steps['active']:.2%}",
            f"{steps['idle_ms']:.3f}",
        )
    table.caption = "less time: of the whole run."
    return table


def peer_table(peer: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> Table:
    """transformers' continuous batching on the same works."""
    options = peer["options"]
    graphs = options["use_cuda_graph"]
    told = [
        f"attention {peer['attention']}",
        "asynchronous" if options["use_async_batching"] else "synchronous",
        "CUDA graphs" if graphs and (graphs is True or any(graphs)) else "no CUDA graphs",
        f"compile level {options['default_compile_level']}",
    ]
    table = Table(title=f"transformers' continuous batching: {', '.join(told)}")
    for name in ("work", "transformers s", "tok/s", "Tokenmill s", "tok/s", "times as fast"):
        table.add_column(name, justify="left" if name == "work" else "right")
    for work in ours:
        seconds = peer["seconds"][work["name"]]
        table.add_row(
            work["name"],
            f"{seconds:.2f}",
            f"{work['tokens'] / seconds:,.0f}",
            f"{work['whole_s']:.2f}",
            f"{work['tokens_per_s']:,.0f}",
            f"{seconds / work['whole_s']:.2f}",
        )
    return table


def fleet_table(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """Pairs of one work, through the fleet and on the bare engine."""
    table = Table(title="Through Celery, Redis and SQLite, one worker, against the bare engine")
    for name in (
        "work",
        "fleet s",
        "tok/s",
        "bare s",
        "tok/s",
        "of bare",
        "slots filled s",
        "worker CPU s",
        "active",
    ):
        table.add_column(name, justify="left" if name == "work" else "right")
    for fleet, bare in pairs:
        table.add_row(
            fleet["name"],
            f"{fleet['whole_s']:.2f}",
            f"{fleet['tokens_per_s']:,.0f}",
            f"{bare['whole_s']:.2f}",
            f"{bare['tokens_per_s']:,.0f}",
            f"{fleet['tokens_per_s'] / bare['tokens_per_s']:.1%}",
            f"{fleet['filling_s']:.2f}",
            f"{fleet['worker_cpu_s']:.1f}",
            f"{fleet['active']:.1%}",
        )
    return table


def overlap_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """GPU-active by the engine's events beside the profiler's trace."""
    table = Table(title="GPU-active, cross-checked with a profiler's trace")
    for name in ("loop", "work", "steps", "ms/step traced", "events", "trace, steps", "trace, kernels"):
        table.add_column(name, justify="left" if name in ("loop", "work") else "right")
    for run in runs:
        active = run["active"]
        table.add_row(
            run["mode"],
            run["work"],
            str(run["steps"]),
            f"{run['step_us'] / 1e3:.3f}",
            "" if active["events"] is None else f"{active['events']:.2%}",
            f"{active['steps']:.2%}",
            f"{active['kernels']:.2%}",
        )
    table.caption = (
        "steps: from each step's first kernel to its last. kernels: the union of all kernels, so that gaps between two "
        "kernels of one graph count as idle. The profiler itself slows the steps."
    )
    return table


def graph_mib(engine: Mapping[str, Any]) -> str:
    """Memory of an engine's graphs, and what they share outside their pool."""
    own, shared = engine.get("graph_bytes", 0), engine.get("graph_shared_bytes", 0)
    return f"{own / MIB:,.0f}" + (f" + {shared / MIB:,.0f}" if shared else "")


def _step(work: Mapping[str, Any]) -> str:
    return "" if work["step_ms"] is None else f"{work['step_ms']:.3f}"
