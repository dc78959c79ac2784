"""One decoder layer by the engine's kernels and by ``torch.compile``, attention by the engine's kernel in both.

What a layer takes is the difference between a graph of several layers and one of the first alone, over the others:
embedding, last norm and head are in both and fall out. The layers have weights of their own, 436 MB each.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

from backend.attention.interface import AttentionKernel, AttentionParams
from backend.fused import FusedDecoder, FusedLayer
from backend.kv_cache import KVCache, LayerShape
from benchmarks.gpu_works import LLAMA_8B
from benchmarks.kernels.common import (
    BF16,
    BLOCK,
    HEADS,
    KV_HEADS,
    SIZE,
    Bench,
    Report,
    relative_error,
    timed,
    wake,
)
from benchmarks.kernels.plain_decoder import PlainDecoder, make_halves
from benchmarks.kernels.steps import Step

DEVICE = "cuda"
LAYERS, VOCABULARY = 5, 1024
MAX_MODEL_LEN = 1024
# (tokens to compute, tokens in the cache before them) of each row; decoding rows first, as in the engine's steps
WORKS: dict[str, list[tuple[int, int]]] = {
    "1 row": [(1, 191)],
    "32 rows": [(1, 191)] * 32,
    "128 rows": [(1, 191)] * 128,
    "256 rows": [(1, 191)] * 256,
    "2048 tokens of 4 prompts": [(512, 0)] * 4,
}
DEFAULT, AUTOTUNED = "default", "max-autotune-no-cudagraphs"
# The compiler's budget may end before the last of them.
AUTOTUNE_ORDER = ("32 rows", "128 rows", "1 row", "256 rows", "2048 tokens of 4 prompts")
COMPILE_LIMIT = 60.0  # seconds for one work
TOLERANCE = 5e-2
COLUMNS = ("attention", "ours", "plain", DEFAULT, AUTOTUNED)


class CompileTimeoutError(BaseException):
    """Compilation took too long. No ``Exception``: the compiler would take those for its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``CompileTimeoutError`` in the main thread once so much time has passed, and until it is heard."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise CompileTimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(slots=True)
class Sides:
    """The engine's decoder and the plain one, over the same weights and the same attention kernel."""

    kernel: AttentionKernel
    ours: FusedDecoder
    plain: PlainDecoder
    layers: list[FusedLayer]


@dataclass(slots=True)
class Work:
    """One step over a cache of its own."""

    name: str
    step: Step
    cache: KVCache
    sides: Sides

    def call(self, decoder: FusedDecoder | PlainDecoder) -> Tensor:
        """One pass of a decoder."""
        return decoder(self.step.tokens, self.step.inputs, self.step.shape, self.cache)

    def micros(self, decoder: FusedDecoder | PlainDecoder) -> float:
        """Of one layer; see the module's docstring."""
        times = []
        layers = self.sides.layers
        for some in (layers[:1], layers):
            decoder.layers = some
            times.append(timed([functools.partial(self.call, decoder)], replays=11))
        return (times[1] - times[0]) / (len(layers) - 1)

    def attention(self) -> float:
        """Microseconds of the attention kernel alone."""
        query = torch.randn(len(self.step.tokens), HEADS, SIZE, device=DEVICE, dtype=BF16)
        attend, step = self.sides.kernel.attend, self.step
        return timed(
            [
                functools.partial(attend, query, i, self.cache, step.inputs, step.shape, layer.attention)
                for i, layer in enumerate(self.sides.layers)
            ]
        )


def bench_layer_compile(bench: Bench) -> None:
    """All works by all ways, then the table."""
    report = bench.report
    works = make_works(make_sides())
    wake()
    report(f"a decoder layer by the engine's kernels and by torch.compile, {LAYERS} layers' weights by turns")
    times: dict[str, dict[str, float]] = {name: {} for name in works}
    seconds: dict[str, dict[str, float]] = {name: {} for name in works}
    for name, work in works.items():
        with report.guarded(f"ours, {name}"):
            expected = work.call(work.sides.ours).clone()
            times[name]["attention"] = work.attention()
            times[name]["ours"] = work.micros(work.sides.ours)
            report(f"  {name}: {times[name]['ours']:.1f} of which attention {times[name]['attention']:.1f}")
            with report.guarded(f"plain, {name}"):
                check(report, f"plain, {name}", work.call(work.sides.plain), expected)
                times[name]["plain"] = work.micros(work.sides.plain)
    left = bench.compile_budget
    for mode, names in ((DEFAULT, tuple(works)), (AUTOTUNED, AUTOTUNE_ORDER)):
        for name in names:
            if left <= 0:
                report(f"  NOT TRIED {mode}, {name}: the budget for compilations is used up")
                continue
            with report.guarded(f"{mode}, {name}"):
                found = measure_compiled(report, works[name], mode, min(COMPILE_LIMIT, left))
                left -= found.seconds
                seconds[name][mode] = found.seconds
                if found.micros is not None:
                    times[name][mode] = found.micros
                    report(f"  {name}, {mode}: {found.micros:.1f}, compiled in {found.seconds:.1f} s")
    tell(report, times, seconds)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What compilation took, and the layer thereafter; None where it was too long or failed."""

    seconds: float
    micros: float | None


def measure_compiled(report: Report, work: Work, mode: str, limit: float) -> Compiled:
    """Compile the halves for this work's shapes and time them in a graph."""
    torch.compiler.reset()  # the halves of other works would count towards the limit of recompilations
    halves = make_halves(HEADS, float(LLAMA_8B["rms_norm_eps"]))
    before, after = (torch.compile(half, mode=mode, fullgraph=True, dynamic=False) for half in halves)
    sides, what = work.sides, f"{mode}, {work.name}"
    plain, uncompiled = sides.plain, sides.plain.halves
    began = time.monotonic()
    try:
        plain.layers, plain.halves = sides.layers[:1], (before, after)
        try:
            with time_limit(limit):
                work.call(plain)
                torch.cuda.synchronize()
        except (Exception, CompileTimeoutError) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            report(f"  FAILED {what}, compiling: {text}")
            report.record("failures", what=f"{what}, compiling", error=text)
            return Compiled(time.monotonic() - began, None)
        seconds = time.monotonic() - began
        sides.ours.layers = plain.layers = sides.layers
        check(report, what, work.call(plain), work.call(sides.ours))
        return Compiled(seconds, work.micros(plain))
    finally:
        plain.layers, plain.halves = sides.layers, uncompiled


def check(report: Report, what: str, output: Tensor, expected: Tensor) -> None:
    """Report logits that are too far from ours; they are timed all the same."""
    difference = relative_error(output, expected)
    if not difference < TOLERANCE:
        report(f"  WRONG {what}: logits differ from ours by {difference:.1e}")
        report.record("failures", what=what, error=f"logits differ from ours by {difference:.1e}")


def make_sides() -> Sides:
    """Both decoders of one model of a few layers with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from backend.attention.triton_paged import TritonKernel

    config = LlamaConfig(**dict(LLAMA_8B) | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY})
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval().requires_grad_(False)
    params = [AttentionParams(scaling=SIZE**-0.5, window=None, softcap=None, sinks=None)] * LAYERS
    kernel = TritonKernel(
        row_sizes=sorted({len(chunks) for chunks in WORKS.values()}),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        max_model_len=MAX_MODEL_LEN,
        dtype=BF16,
        device=torch.device(DEVICE),
    )
    ours = FusedDecoder(model, params, kernel, max_model_len=MAX_MODEL_LEN)
    plain = PlainDecoder.of(model, params, kernel, max_model_len=MAX_MODEL_LEN, layers=ours.layers)
    return Sides(kernel, ours, plain, ours.layers)


def make_works(sides: Sides) -> dict[str, Work]:
    """A cache and a step for each row count."""
    works = {}
    for name, chunks in WORKS.items():
        step = Step.of(chunks, block_size=BLOCK, vocabulary=VOCABULARY, device=DEVICE)
        shapes = [LayerShape(KV_HEADS, SIZE)] * len(sides.layers)
        cache = KVCache(
            shapes, num_blocks=step.num_blocks, block_size=BLOCK, dtype=BF16, device=torch.device(DEVICE)
        )
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        works[name] = Work(name, step, cache, sides)
    return works


def tell(report: Report, times: dict[str, dict[str, float]], seconds: dict[str, dict[str, float]]) -> None:
    """The table, and a record for each work."""
    report(
        "µs a layer with attention by the engine's kernel, which is alone in the first column; rows decode at"
    )
    report(
        "context 192. plain: the same operations uncompiled, in the graph. In brackets: seconds to compile, of the"
    )
    report(
        "first work with the compiler's own start; it sees the halves of a layer before and after attention."
    )
    widths = dict(zip(COLUMNS, (10, 8, 8, 16, 16), strict=True))
    heads = "".join(f"{column.removesuffix('-no-cudagraphs'):>{width}}" for column, width in widths.items())
    report(f"  {'':24}{heads}  the best compiled to ours")
    for name, found in times.items():
        line = f"  {name:24}"
        for column, width in widths.items():
            cell = f"{found[column]:.1f}" if column in found else "-"
            if column in seconds[name]:
                cell += f" ({seconds[name][column]:.0f} s)"
            line += f"{cell:>{width}}"
        compiled = [found[mode] for mode in (DEFAULT, AUTOTUNED) if mode in found]
        if compiled and found.get("ours", 0) > found["attention"]:
            best, ours, attention = min(compiled), found["ours"], found["attention"]
            line += f"  {best / ours:.3f}, less attention {(best - attention) / (ours - attention):.3f}"
        report(line)
        report.record("layer_compile", work=name, micros=found, compile_s=seconds[name])
