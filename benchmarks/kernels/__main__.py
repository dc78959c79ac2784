"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.kernels.common import COMPILE_BUDGET, Bench, Cache, Report

# Where each part is: a module that is loaded only if the part runs, since most of them need Triton.
PARTS = {
    "rates": "small",
    "small": "small",
    "sampling": "sampling",
    "decode": "decode",
    "linear": "linear",
    "chain": "chain",
    "prefill": "prefill",
    "linear_lt": "linear_lt",
    "layer_compile": "layer_compile",
}
COMPARISONS = ("linear_lt", "layer_compile")  # with other software; they run only if they are named
USUAL = [name for name in PARTS if name not in COMPARISONS]


def parse_parts(text: str) -> list[str]:
    """The parts that a comma-separated list names, in its order.

    Raises:
        argparse.ArgumentTypeError: one of them does not exist, or none is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or repr(text)} is no part. Give some of {', '.join(PARTS)}"
        )
    return names


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's options; an error in them ends the process with a message."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Time the GPU kernels")
    parser.add_argument(
        "--parts", "--only", type=parse_parts, default=USUAL, help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--sweep", action="store_true", help="try every launch configuration")
    parser.add_argument("--warm", metavar="I/N", help="only compile a share of the sweeps' kernels")
    parser.add_argument(
        "--output", type=Path, help="a text file; what parts record goes to the same name ending in .json"
    )
    parser.add_argument(
        "--compile-budget",
        type=float,
        default=COMPILE_BUDGET,
        metavar="SECONDS",
        help="that layer_compile's compilations may take in all, %(default)s if unset",
    )
    options = parser.parse_args(arguments)
    if options.compile_budget < 0:
        parser.error(f"--compile-budget is {options.compile_budget}. Give 0 or more seconds")
    if options.output is not None and options.output.suffix == ".json":
        parser.error(
            f"--output is {options.output}, where the records go. Give the text another ending: .txt"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    torch.manual_seed(0)
    if options.warm:
        importlib.import_module("benchmarks.kernels.warm").warm(options.warm, Cache(4096))
        return
    import triton

    report = Report(options.output)
    name = torch.cuda.get_device_name()
    report(f"{name}, torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}")
    report(
        f"command: python -m benchmarks.kernels {' '.join(sys.argv[1:] if arguments is None else arguments)}"
    )
    bench = Bench(report, options.sweep, options.compile_budget)
    for part in options.parts:
        began = time.monotonic()
        with report.guarded(part):
            module = importlib.import_module(f"benchmarks.kernels.{PARTS[part]}")
            getattr(module, f"bench_{part}")(bench)
        print(f"({part}: {time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
