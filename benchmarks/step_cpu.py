"""What the host spends on a step, without a model: scheduling, block tables, input buffers.

    python -m benchmarks.step_cpu
    python -m benchmarks.step_cpu --requests 3000

A stub takes the model's place, so that all the time is the engine's own. The time to prepare a step is what a
GPU would have to hide; it must stay flat however many requests have gone through.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from backend.api import (
    GenerationHandle,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TokenLogprob,
    TokenmillError,
)
from backend.assembly import make_core
from backend.config import EngineConfig
from backend.core import EngineCore
from backend.sequence import Sequence
from backend.slots import Slot
from benchmarks import report

PROMPT_TOKENS = (16, 256)
NEW_TOKENS = (16, 128)
VOCABULARY = 32_000
BLOCK_SIZE = 16


class StubRunner:
    """Samples token 0 for each row at no cost."""

    def __init__(self, rows: int) -> None:
        self._tokens = torch.zeros(rows, dtype=torch.int32)

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        """See ``Runner.execute``."""
        slot.store_output(self._tokens[: len(slot.sampled)], None, None, None)


class CountingSink:
    """Counts what has ended."""

    def __init__(self) -> None:
        self.finished = 0

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Nothing streams here."""

    def finish(self, sequence: Sequence, now: float) -> None:
        """One more is done."""
        self.finished += 1

    def fail(self, sequence: Sequence, error: TokenmillError) -> None:
        """No request may fail here."""
        raise error


@dataclass(frozen=True)
class Steps:
    """Milliseconds of each step of a run, in order."""

    rows: int
    prepare: list[float]
    whole: list[float]
    running: float  # rows after a step, on average

    def decile(self, number: int) -> float:
        """Median time to prepare a step in one tenth of the run (0 to 9)."""
        tenth = len(self.prepare) // 10
        return statistics.median(self.prepare[number * tenth : (number + 1) * tenth])


def measure(rows: int, requests: int, seed: int = 0) -> Steps:
    """Run ``requests`` through ``rows`` slots, and time each step as long as requests wait."""
    sink = CountingSink()
    core = _core(rows, sink)
    draw = random.Random(seed)
    for number in range(requests):
        core.add(_sequence(number, draw))
    prepare: list[float] = []
    whole: list[float] = []
    running: list[int] = []
    gc.collect()
    gc.freeze()  # what the requests themselves hold is the benchmark's, not the engine's
    while core.has_work():
        busy = core.scheduler.num_waiting > 0
        before, began = core.prepare_s, time.perf_counter()
        core.step()
        took = time.perf_counter() - began
        if busy:
            running.append(len(core.scheduler.running))
            prepare.append((core.prepare_s - before) * 1e3)
            whole.append(took * 1e3)
    gc.unfreeze()
    if sink.finished != requests:
        raise RuntimeError(f"{requests - sink.finished} of {requests} requests have not ended")
    core.check_idle()
    return Steps(rows, prepare, whole, statistics.fmean(running))


def _core(rows: int, sink: CountingSink) -> EngineCore:
    longest = PROMPT_TOKENS[1] + NEW_TOKENS[1]
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=max(512, 8 * rows), block_size=BLOCK_SIZE)
    return make_core(
        config,
        runner=StubRunner(rows),
        num_blocks=rows * -(-longest // BLOCK_SIZE),
        max_model_len=longest,
        device=torch.device("cpu"),
        sink=sink,
    )


def _sequence(number: int, draw: random.Random) -> Sequence:
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(*PROMPT_TOKENS))]
    new_tokens = draw.randint(*NEW_TOKENS)
    request = GenerationRequest(
        request_id=str(number),
        prompt=Prompt(token_ids=tuple(prompt)),
        sampling=SamplingParams(max_tokens=new_tokens, ignore_eos=True),
    )
    return Sequence(
        request,
        GenerationHandle(request, lambda: None),
        prompt,
        number=number,
        seed=0,
        eos_ids=frozenset(),
        max_new_tokens=new_tokens,
        arrived_at=0.0,
    )


def table(runs: list[Steps], requests: int) -> Table:
    """One line for each number of rows."""
    shown = Table(title=f"CPU time a step, ms, over {requests} requests and no model")
    columns = (
        "rows",
        "running",
        "steps",
        "prepare median",
        "mean",
        "99 %",
        "first tenth",
        "last tenth",
        "whole median",
    )
    for column in columns:
        shown.add_column(column, justify="right")
    for run in runs:
        ordered = sorted(run.prepare)
        figures = (
            statistics.median(ordered),
            statistics.fmean(ordered),
            ordered[len(ordered) * 99 // 100],
            run.decile(0),
            run.decile(9),
            statistics.median(run.whole),
        )
        shown.add_row(
            str(run.rows), f"{run.running:.0f}", str(len(ordered)), *(f"{figure:.3f}" for figure in figures)
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement; see the module's text."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="32,256", help="numbers of slots, with commas between")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.requests < 10 * max(int(rows) for rows in options.rows.split(",")):
        parser.error(
            "--requests: give at least ten for each row, so that the slots are full most of the time"
        )
    torch.set_num_threads(1)
    runs = [measure(int(rows), options.requests) for rows in options.rows.split(",")]
    data = {
        str(run.rows): {
            "steps": len(run.prepare),
            "prepare_ms_median": round(statistics.median(run.prepare), 4),
            "prepare_ms_by_tenth": [round(run.decile(number), 4) for number in range(10)],
            "whole_ms_median": round(statistics.median(run.whole), 4),
        }
        for run in runs
    }
    command = " ".join(["python -m benchmarks.step_cpu", *(sys.argv[1:] if arguments is None else arguments)])
    report.keep(
        "step_cpu",
        command,
        [table(runs, options.requests)],
        {"requests": options.requests, "rows": data},
        options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
