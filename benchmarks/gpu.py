"""The engine on one GPU against the memory floor: Llama-3.1-8B's shape, random bf16 weights, greedy, no end token.

    python -m benchmarks.gpu                          every work of the table
    python -m benchmarks.gpu --works 32x256,32x1024   some of them: ROWSxNEW
    python -m benchmarks.gpu --mode sync              what the asynchronous loop is worth

Decode ms/step = (whole run - time to the last first token) / (new tokens - 1). The floor is the bytes of weights and
of keys and values a step must read, over the highest read rate measured in this run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from backend.api import GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine

PROMPT_TOKENS = 64
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHOWN = (
    "mode",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "attention",
    "layers",
    "graph_bytes",
)
DEFAULT_WORKS = "32x256,32x1024,128x1024,256x1024"


@dataclass(frozen=True)
class Work:
    """``rows`` requests at once, ``new`` tokens each."""

    rows: int
    new: int


def weight_bytes(layers: int) -> int:
    """Bytes of the matrices that a step reads whole; of the embedding it reads a few rows."""
    return 2 * (layers * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096)


def kv_bytes_a_token(layers: int) -> int:
    """Bytes of one token's keys and values."""
    return 2 * layers * 8 * 128 * 2


def read_rate() -> float:
    """Highest rate of plain reductions over a large tensor, bytes/s."""
    import torch

    data = torch.ones(2**31, dtype=torch.float32, device="cuda")
    best = 0.0
    for reduce in (torch.sum, torch.amax, torch.linalg.vector_norm) * 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        reduce(data)
        end.record()
        end.synchronize()
        best = max(best, data.numel() * data.element_size() / (start.elapsed_time(end) / 1e3))
    return best


def run(engine: AsyncEngine, requests: list[tuple[int, int]]) -> dict[str, float]:
    """Submit all requests (prompt and new tokens) at once, wait for all; times and counts."""
    prompts = [
        tuple(random.Random(index).randrange(5, 120_000) for _ in range(count))
        for index, (count, _) in enumerate(requests)
    ]
    before = engine.stats()
    began = time.monotonic()
    handles = [
        engine.submit(
            GenerationRequest(
                request_id=str(index),
                prompt=Prompt(token_ids=prompt),
                sampling=SamplingParams(max_tokens=new, ignore_eos=True),
            )
        )
        for index, (prompt, (_, new)) in enumerate(zip(prompts, requests, strict=True))
    ]
    results = [handle.result() for handle in handles]
    whole = time.monotonic() - began
    after = engine.stats()
    tokens = sum(result.completion_tokens for result in results)
    assert tokens == sum(new for _, new in requests)
    prefill = max(r.time_to_first_token_s or 0.0 for r in results)
    steps = after.steps - before.steps
    return {
        "whole_s": whole,
        "prefill_s": prefill,
        "tokens": tokens,
        "tokens_per_s": tokens / whole,
        "steps": steps,
        "active": (after.busy_s - before.busy_s) / whole,
        "prepare_ms": 1e3 * (after.prepare_s - before.prepare_s) / steps,
        "busy_ms": 1e3 * (after.busy_s - before.busy_s) / steps,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", default=DEFAULT_WORKS)
    parser.add_argument("--mixed", type=Path, help='JSON of {"requests": [[prompt tokens, new tokens], …]}')
    parser.add_argument("--mode", choices=["async", "sync"], default="async")
    parser.add_argument("--layers", type=int, default=32, help="fewer layers for a quick look")
    parser.add_argument("--tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some decode steps")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    import torch
    import transformers

    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    weights, kv_bytes = weight_bytes(arguments.layers), kv_bytes_a_token(arguments.layers)
    rate = read_rate()
    say(f"# python -m benchmarks.gpu {' '.join(sys.argv[1:])}")
    say(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    say(f"# read rate {rate / 1e12:.2f} TB/s, weights {weights / 1e9:.2f} GB a step")
    works = [Work(*map(int, work.split("x"))) for work in arguments.works.split(",") if work]
    mixed = json.loads(arguments.mixed.read_text())["requests"] if arguments.mixed else []
    longest = max([PROMPT_TOKENS + w.new for w in works] + [sum(r) for r in mixed])
    rows = max([w.rows for w in works] + ([256] if mixed else []))
    with tempfile.TemporaryDirectory() as folder:
        config = LLAMA_8B | {"num_hidden_layers": arguments.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        began = time.monotonic()
        engine = AsyncEngine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                tokenizer="none",
                device="cuda",
                mode=arguments.mode,
                max_num_seqs=rows,
                max_num_batched_tokens=max(arguments.tokens, rows),
                max_model_len=longest + 16,
                cuda_graphs=not arguments.no_graphs,
                prefix_cache=False,
            )
        )
        engine.start()
        run(engine, [(PROMPT_TOKENS, 8)] * 2)
        details = engine.info().details
        say(f"# start to first tokens {time.monotonic() - began:.1f} s")
        say("# " + ", ".join(f"{name} {details[name]}" for name in SHOWN if name in details))
        try:
            for work in works:
                figures = run(engine, [(PROMPT_TOKENS, work.new)] * work.rows)
                step = (figures["whole_s"] - figures["prefill_s"]) / (work.new - 1)
                context = PROMPT_TOKENS + work.new / 2
                floor = (weights + work.rows * context * kv_bytes) / rate
                say(
                    f"batch {work.rows:4d} new {work.new:5d}: {step * 1e3:6.3f} ms/step (floor {floor * 1e3:.2f}, "
                    f"{floor / step:.0%}), whole {figures['whole_s']:.2f} s, {figures['tokens_per_s']:,.0f} tok/s, "
                    f"active {figures['active']:.2%}, prepare {figures['prepare_ms']:.3f} ms, "
                    f"busy {figures['busy_ms']:.3f} ms"
                )
            if mixed:
                figures = run(engine, [tuple(r) for r in mixed])
                say(
                    f"mixed {len(mixed)} requests: {figures['whole_s']:.2f} s, {figures['tokens_per_s']:,.0f} tok/s, "
                    f"{figures['steps']:.0f} steps, active {figures['active']:.2%}"
                )
            if arguments.profile:
                from torch.profiler import ProfilerActivity, profile

                with profile(activities=[ProfilerActivity.CUDA]) as trace:
                    run(engine, [(PROMPT_TOKENS, 40)] * min(rows, 32))
                say(
                    trace.key_averages().table(
                        sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70
                    )
                )
        finally:
            engine.shutdown(drain=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
