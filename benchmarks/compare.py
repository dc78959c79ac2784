"""This engine against transformers' ``generate`` and continuous batching: same model, same prompts, one run.

    python -m benchmarks.compare
    python -m benchmarks.compare --systems async,generate --repetitions 5
    python -m benchmarks.compare --limit 16 --repetitions 1        # a quick look

All systems are loaded, then take turns (A B C D, A B C D, …), because a machine's speed drifts: ratios of the
medians hold better than the numbers themselves. Every prompt gets exactly the tokens that the workload says,
end-of-sequence tokens are passed over, and before it counts each system does a small piece of the work.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from backend.config import EngineConfig
from benchmarks import report
from benchmarks.systems import System, Tokens, builders
from benchmarks.workload import Work, load_prompts, mixed, uniform

PEERS = ("transformers generate", "transformers CB")
OURS = "tokenmill async"


@dataclass
class Measured:
    """What one system did with one workload."""

    seconds: list[float] = field(default_factory=list)
    tokens: Tokens = field(default_factory=list)

    def rate(self, work: Work) -> float:
        """Median new tokens a second."""
        return work.total / statistics.median(self.seconds)


Measurements = dict[str, dict[str, Measured]]  # by workload, then by system


def measure(
    systems: list[System],
    works: list[Work],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> Measurements:
    """Let the systems take turns over the workloads.

    Raises:
        RuntimeError: a system returned another number of tokens than it was asked for.
    """
    for system in systems:
        system.run(works[0].head(32, 4))
    found: Measurements = {work.name: {system.name: Measured() for system in systems} for work in works}
    for repetition in range(repetitions):
        for work in works:
            for system in systems:
                began = clock()
                tokens = system.run(work)
                took = clock() - began
                if (counts := tuple(map(len, tokens))) != work.new_tokens:
                    raise RuntimeError(f"{system.name} returned {sum(counts)} tokens instead of {work.total}")
                found[work.name][system.name].seconds.append(took)
                found[work.name][system.name].tokens = tokens
                say(
                    f"{repetition + 1}/{repetitions} {work.name:8} {system.name:22} {work.total / took:7.1f} tok/s"
                )
    return found


def table(work: Work, measured: dict[str, Measured]) -> Table:
    """The systems on one workload, and each as a multiple of the better peer."""
    best = max((measured[name].rate(work) for name in PEERS if name in measured), default=None)
    reference = measured.get(PEERS[0])
    shortest, longest = min(work.new_tokens), max(work.new_tokens)
    lengths = f"{shortest} to {longest}" if shortest < longest else f"{shortest}"
    shown = Table(
        title=f"{work.name}: {len(work.prompts)} prompts, {lengths} new tokens, {work.total} in all"
    )
    for column in ("system", "tok/s", "seconds (median, all)", "x better peer", "answers as generate"):
        shown.add_column(column, justify="left" if column == "system" else "right")
    for name, one in sorted(measured.items(), key=lambda item: -item[1].rate(work)):
        each = " ".join(f"{seconds:.1f}" for seconds in one.seconds)
        ratio = f"{one.rate(work) / best:.2f}" if best else "-"
        same = "-"
        if reference is not None:
            equal = sum(a == b for a, b in zip(one.tokens, reference.tokens, strict=True))
            same = f"{equal}/{len(work.prompts)}"
        shown.add_row(
            name, f"{one.rate(work):.1f}", f"{statistics.median(one.seconds):.1f} ({each})", ratio, same
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; see the module's text."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", help="float32 on a CPU when left at auto")
    parser.add_argument(
        "--systems", default="async,sync,generate,cb", help="any of async, sync, generate, cb"
    )
    parser.add_argument("--works", default="mixed,uniform", help="any of mixed, uniform")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=int, default=64, help="prompts, at most 64")
    parser.add_argument(
        "--slots", type=int, default=32, help="requests at once, and the size of a static batch"
    )
    parser.add_argument("--batched-tokens", type=int, default=512, help="tokens in a step at most")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    parser.add_argument("--name", default="compare", help="name of the two result files")
    options = parser.parse_args(arguments)
    makers = {"mixed": mixed, "uniform": uniform}
    for name in options.works.split(","):
        if name not in makers:
            parser.error(f"--works: {name!r} is unknown. Use any of {', '.join(makers)}")
    for name in ("limit", "repetitions"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)} is too few. Use 1 or more")
    logging.getLogger("transformers").setLevel(logging.ERROR)

    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.slots,
        max_num_batched_tokens=options.batched_tokens,
        max_model_len=1024,
    )
    known = builders(config, options.slots)
    systems: list[System] = []
    try:
        for short in options.systems.split(","):
            if short not in known:
                parser.error(f"--systems: {short!r} is unknown. Use any of {', '.join(known)}")
            print(f"loading {short} …", file=sys.stderr)
            systems.append(known[short]())
        prompts = load_prompts(_tokenizer(config), limit=options.limit)
        works = [makers[name](prompts) for name in options.works.split(",")]
        found = measure(systems, works, options.repetitions, say=lambda line: print(line, file=sys.stderr))
    finally:
        for system in systems:
            system.close()
    tables = [table(work, found[work.name]) for work in works]
    command = " ".join(
        ["python -m benchmarks.compare", *(arguments if arguments is not None else sys.argv[1:])]
    )
    files = report.keep(options.name, command, tables, _data(config, works, found), options.output)
    print(f"written: {', '.join(file.name for file in files)}", file=sys.stderr)
    return 0


def _tokenizer(config: EngineConfig) -> Any:
    from transformers import AutoTokenizer

    from backend.model_source import resolve_model

    return AutoTokenizer.from_pretrained(resolve_model(config.tokenizer or config.model).location)


def _data(config: EngineConfig, works: list[Work], found: Measurements) -> dict[str, Any]:
    return {
        "engine": config.model_dump(mode="json", exclude_defaults=True),
        "works": {
            work.name: {
                "prompts": len(work.prompts),
                "prompt_tokens": sum(map(len, work.prompts)),
                "new_tokens": work.total,
                "systems": {
                    name: {
                        "tokens_per_s": round(one.rate(work), 2),
                        "seconds": [round(s, 3) for s in one.seconds],
                    }
                    for name, one in found[work.name].items()
                },
            }
            for work in works
        },
    }


if __name__ == "__main__":
    sys.exit(main())
