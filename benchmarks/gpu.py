"""The engine on one GPU: Llama-3.1-8B's shape, random bf16 weights, greedy, no end token.

    python -m benchmarks.gpu                             the whole table, transformers in the same run
    python -m benchmarks.gpu --quick                     without the work of 8192 new tokens
    python -m benchmarks.gpu --works 32x256,mixed        some works: ROWSxNEW, ROWSxNEW@PROMPT, mixed
    python -m benchmarks.gpu --parts fleet               a part alone, with the works that it is compared with
    python -m benchmarks.gpu --tiny                      a toy model, also on a CPU, to try the command itself

Parts: works (short contexts in one engine, long ones in another, whose cache has room for fewer slots), sync, peer
(transformers), fleet (the same work as Celery jobs), overlap (a profiler's trace), and kernels (what the
time of a decode step is spent in). Each engine is made for its part, and its memory is given back before the next one.

The floor is the bytes of weights and of keys and values that the steps must read, over the highest read rate
measured in this run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import gpu_report, overlap, step_kernels
from benchmarks.gpu_works import (
    LLAMA_8B,
    MIXED_FILE,
    SHORT_CONTEXT,
    TINY,
    Work,
    mixed,
    parse_works,
    uniform,
    weight_bytes,
)
from benchmarks.report import environment

PARTS = ("works", "sync", "peer", "fleet", "overlap", "kernels")
DEFAULT_PARTS = "works,sync,peer"
WORKS = "32x256,32x1024,128x1024,256x1024,mixed,32x8192"
QUICK_WORKS = "32x256,32x1024,128x1024,256x1024,mixed"
TINY_WORKS = "4x80,8x120,mixed-12"


class Bench:
    """One measurement: runs the parts that are asked for, prints each result as it comes, and keeps all.

    A part that fails is reported and does not keep the others from running.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, say: Callable[[str | Table], None]) -> None:
        self._options = options
        self._folder = folder
        self._say = say
        self._tiny = bool(options.tiny)
        self._shape = dict(TINY if options.tiny else LLAMA_8B)
        if options.layers:
            self._shape["num_hidden_layers"] = options.layers
        self._device = str(options.device)
        self._rate = 0.0
        self._done: dict[str, dict[str, Any]] = {}
        self.kept: dict[str, Any] = {"works": [], "engines": [], "failed": []}

    def run(self, parts: list[str], works: list[Work], began: float) -> None:
        """Run the parts; ``began`` is when the process did, on the monotonic clock."""
        import torch

        from benchmarks.gpu_engine import write_shape

        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        write_shape(self._folder / "shape", self._shape)
        short = self._with_compared([work for work in works if work.context <= SHORT_CONTEXT], parts)
        groups = [group for group in (short, [w for w in works if w.context > SHORT_CONTEXT]) if group]
        for group in groups:
            with self._part("works"):
                self._works(group, None if self._rate else began)
        if self.kept["works"]:
            self._say(gpu_report.works_table(self.kept["works"]))
        if "sync" in parts:
            with self._part("sync"):
                self._sync(short)
        for name, part in (("peer", self._peer), ("fleet", self._fleet)):
            if name in parts:
                with self._part(name):
                    part()
        if "overlap" in parts or "kernels" in parts:
            with self._part("overlap"):
                self._traced(parts)
        self._say(gpu_report.engines_table(self.kept["engines"]))

    # -------------------------------------------------------------------------------------------------- the parts

    def _with_compared(self, works: list[Work], parts: list[str]) -> list[Work]:
        """The works, and those that other parts compare theirs with."""
        wanted = list(works)
        for part, needed in (
            ("sync", self._sync_works()),
            ("peer", self._peer_works()),
            ("fleet", self._fleet_works()),
        ):
            if part in parts:
                wanted += [work for work in needed if work.name not in {each.name for each in wanted}]
        return wanted

    def _works(self, works: list[Work], began: float | None) -> None:
        from benchmarks.gpu_engine import measured

        with measured(self._configuration(works, mode=self._options.mode), began) as engine:
            self._started(engine.describe())
            if not self._rate:
                self._measure_rate()
            for work in works:
                figures = engine.run(work).to_dict()
                figures["floor_s"] = work.floor_s(self._shape, self._rate)
                step_ms = figures["step_ms"]
                spent = step_ms * work.steps / 1e3 if step_ms and work.steps else figures["whole_s"]
                figures["floor_share"] = figures["floor_s"] / spent
                self._done[work.name] = figures
                self.kept["works"].append(figures)
                self._progress(figures)

    def _sync(self, group: list[Work]) -> None:
        """The same engine as that of ``group``, with the switch ``sync``; nothing else differs."""
        from benchmarks.gpu_engine import measured

        found = []
        with measured(self._configuration(group, mode="sync")) as engine:
            self._started(engine.describe())
            for work in self._sync_works():
                found.append(engine.run(work).to_dict())
                self._progress(found[-1])
        self.kept["sync"] = found
        self._say(gpu_report.sync_table([(self._done[each["name"]], each) for each in found]))

    def _peer(self) -> None:
        from benchmarks import gpu_peer

        works = self._peer_works()
        found = gpu_peer.measure(
            self._folder / "shape",
            works,
            device=self._device,
            timeout_s=self._options.peer_timeout,
            compile_level=self._options.peer_compile,
        )
        self.kept["peer"] = found
        self._say(gpu_report.peer_table(found, [self._done[work.name] for work in works]))

    def _fleet(self) -> None:
        from benchmarks import gpu_fleet

        works = self._fleet_works()
        found = []
        config = self._configuration(works, mode="async")
        for figures in gpu_fleet.measure(
            self._folder / "fleet", config, works, timeout_s=self._options.fleet_timeout
        ):
            found.append(figures.to_dict())
            self._say(f"fleet {figures.name}: {figures.whole_s:.2f} s, {figures.tokens_per_s:,.0f} tok/s")
        self.kept["fleet"] = found
        self._say(gpu_report.fleet_table([(each, self._done[each["name"]]) for each in found]))

    def _traced(self, parts: list[str]) -> None:
        """What needs a profiler, which slows a process for good: in engines of their own, after everything else."""
        from benchmarks.gpu_engine import measured

        if self._device == "cpu":
            raise RuntimeError("the profiler traces a GPU, and there is none")
        if "overlap" in parts:
            work = uniform(32, 1024)
            runs = []
            for mode in ("async", "sync"):
                with measured(self._configuration([work], mode=mode)) as engine:
                    self._started(engine.describe())
                    runs.append(overlap.record(engine, work))
            self.kept["overlap"] = {"runs": runs}
            self._say(gpu_report.overlap_table(runs))
        if "kernels" in parts:
            works = [uniform(rows, 1024) for rows in (32, 128, 256)]
            with measured(self._configuration(works, mode="async")) as engine:
                self._started(engine.describe())
                for work in works:
                    self._say(step_kernels.record(engine, work))

    # ---------------------------------------------------------------------------------------- works of the parts

    def _sync_works(self) -> list[Work]:
        return [uniform(4, 80)] if self._tiny else [uniform(32, 256), uniform(32, 1024)]

    def _peer_works(self) -> list[Work]:
        if self._tiny:
            return [uniform(4, 80)]
        return [uniform(32, 256), mixed(self._options.mixed or MIXED_FILE, count=32, slots=32, shorten=4)]

    def _fleet_works(self) -> list[Work]:
        if self._tiny:
            return [mixed(count=12, slots=8)]
        return [mixed(self._options.mixed or MIXED_FILE)]

    # ------------------------------------------------------------------------------------------------------ helpers

    def _configuration(self, works: list[Work], **options: Any) -> Any:
        from benchmarks.gpu_engine import configuration

        given = self._options
        options |= {"device": self._device, "cuda_graphs": not given.no_graphs}
        options |= {"prefill_attention": given.prefill}
        if given.tokens:
            options["max_num_batched_tokens"] = max(given.tokens, *(work.slots for work in works))
        return configuration(self._folder / "shape", works, **options)

    def _measure_rate(self) -> None:
        import torch

        from benchmarks.gpu_engine import read_rate

        self._rate = read_rate(self._device)
        if self._device != "cpu":
            torch.cuda.empty_cache()
        weights = weight_bytes(self._shape)
        self.kept |= {"read_rate_bytes_per_s": self._rate, "weight_bytes": weights}
        self._say(f"read rate {self._rate / 1e12:.2f} TB/s, weights {weights / 1e9:.2f} GB a step")

    def _started(self, facts: dict[str, Any]) -> None:
        self.kept["engines"].append(facts)
        self._say(
            f"{facts['mode']} engine: start to first token {facts['start_to_first_token_s']:.1f} s "
            f"({facts['kernels_built']} kernels built), graphs {gpu_report.graph_mib(facts)} MiB, "
            f"{facts['num_kv_blocks']} KV blocks, attention {facts['attention']}, "
            f"that of long prompts {facts['long_prefill']}, layers {facts['layers']}"
        )

    def _progress(self, figures: dict[str, Any]) -> None:
        step = "" if figures["step_ms"] is None else f"{figures['step_ms']:.3f} ms/step, "
        active = (figures["steady"] or figures["all"])["active"]
        self._say(
            f"{figures['name']}: {step}whole {figures['whole_s']:.2f} s, {figures['tokens_per_s']:,.0f} tok/s, "
            f"{figures['all']['steps']} steps, active {active:.2%} (whole run {figures['all']['active']:.2%})"
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self.kept["failed"].append(name)
            traceback.print_exc()
            self._say(f"{name} failed: {exc}")


def options_from(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help=f"any of {', '.join(PARTS)}; {DEFAULT_PARTS} when unset")
    parser.add_argument("--works", help=f"{WORKS} when unset")
    parser.add_argument("--quick", action="store_true", help="leave out the work of 8192 new tokens")
    parser.add_argument(
        "--mixed", type=Path, help='another mixed work: {"requests": [[prompt, new tokens], …]}'
    )
    parser.add_argument("--mode", choices=["async", "sync"], default="async", help="of the works' engines")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--tokens", type=int, help="max_num_batched_tokens; 2048 when unset")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--prefill", default="auto", help="the setting prefill_attention")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a toy model and short works")
    parser.add_argument("--peer-compile", type=int, choices=range(4), default=0, help="transformers' level")
    parser.add_argument("--peer-timeout", type=float, default=120.0, help="seconds for transformers in all")
    parser.add_argument(
        "--fleet-timeout", type=float, default=120.0, help="seconds for each work of the fleet"
    )
    parser.add_argument("--json", type=Path, help="keep every figure here")
    parser.add_argument("--trace", type=Path, help="keep the intervals of the overlap here, to be drawn")
    parser.add_argument("--out", type=Path, help="write what is printed here, too")
    options = parser.parse_args(arguments)
    parts = options.parts or ("works" if options.works else DEFAULT_PARTS)
    options.parts = [part for part in parts.split(",") if part]
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if options.works is None:
        full = TINY_WORKS if options.tiny else QUICK_WORKS if options.quick else WORKS
        options.works = full if "works" in options.parts else ""
    try:
        options.works = parse_works(options.works, options.mixed or MIXED_FILE)
    except (ValueError, OSError, KeyError) as exc:
        parser.error(f"--works: {exc}")
    if options.mixed and "works" in options.parts and "mixed" not in {work.name for work in options.works}:
        options.works.append(mixed(options.mixed))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 1 if a part failed, 2 where there is nothing to measure."""
    began = time.monotonic() - _process_age_s()
    options = options_from(arguments)
    gpu = _gpu_name()
    if gpu is None and not options.tiny:
        print("PyTorch sees no CUDA device here. --tiny runs a toy model on the CPU instead", file=sys.stderr)
        return 2
    given = sys.argv[1:] if arguments is None else arguments
    out = options.out.open("w", encoding="utf-8") if options.out else None

    def say(what: str | Table) -> None:
        print_to = [Console(width=116), *([Console(file=out, width=116, color_system=None)] if out else [])]
        for console in print_to:
            console.print(what, highlight=False, markup=False, soft_wrap=isinstance(what, str))
        if out:
            out.flush()

    facts = environment(("torch", "triton", "transformers")) | {"gpu": gpu or "none"}
    command = shlex.join(["python", "-m", "benchmarks.gpu", *given])
    say(f"$ {command}")
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder), say)
        try:
            bench.run(options.parts, options.works, began)
        finally:
            say(f"all in {time.monotonic() - began:.0f} s")
            record = {"command": command, "environment": facts, **bench.kept}
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            if options.trace and "overlap" in bench.kept:
                options.trace.write_text(json.dumps({"command": command, **bench.kept["overlap"]}) + "\n")
            if out:
                out.close()
    return 1 if bench.kept["failed"] else 0


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _process_age_s() -> float:
    """Seconds since this process began, so that the imports count in the time to the first token."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


if __name__ == "__main__":
    sys.exit(main())
