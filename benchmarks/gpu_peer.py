"""transformers' continuous batching on the same works, in a process of its own that cannot hold up the measurement.

It runs as its authors advise for speed: asynchronous batching, CUDA graphs, compiled where ``compile_level`` says
so, and a flash-attention package if one is installed. Without one it falls back to PyTorch's SDPA over a mask, which is
much slower; the result says which it was.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.gpu_works import PROMPT_TOKENS, Work

_FLASH = (("flash_attn_interface", "flash_attention_3"), ("flash_attn", "flash_attention_2"))
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class PeerSpec:
    """What the child is to do. Works as (name, requests), which JSON can hold."""

    folder: str
    device: str
    works: list[tuple[str, list[list[int]]]]
    slots: int
    context: int
    compile_level: int
    graphs: bool


def measure(
    folder: Path,
    works: list[Work],
    *,
    device: str,
    timeout_s: float,
    compile_level: int = 0,
    graphs: bool = True,
) -> dict[str, Any]:
    """Run the child and return what it measured: ``attention``, options, and seconds for each work.

    Raises:
        RuntimeError: it failed or took longer than ``timeout_s``; the message has the end of its output.
    """
    spec = PeerSpec(
        folder=str(folder),
        device=device,
        works=[(work.name, [list(request) for request in work.requests]) for work in works],
        slots=max(work.slots for work in works),
        context=max(work.context for work in works),
        compile_level=compile_level,
        graphs=graphs,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_peer"],
            input=json.dumps(asdict(spec)),
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        tail = _tail(exc.stderr.decode(errors="replace") if isinstance(exc.stderr, bytes) else exc.stderr)
        raise RuntimeError(f"not done after {timeout_s:.0f} s\n{tail}") from None
    if done.returncode:
        raise RuntimeError(f"ended with status {done.returncode}\n{_tail(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def attention_for_this_host() -> str:
    """The fastest attention whose package is installed."""
    return next((name for package, name in _FLASH if importlib.util.find_spec(package)), "sdpa")


def run(spec: PeerSpec) -> dict[str, Any]:
    """In the child: load, warm up, do the works."""
    import torch

    from backend.config import EngineConfig
    from backend.loading import load_model
    from backend.transformers_manager import start_manager, stop_manager

    began = time.monotonic()
    attention = attention_for_this_host()
    config = EngineConfig(
        model=spec.folder,
        load_format="dummy",
        tokenizer="none",
        device=spec.device,
        max_num_seqs=spec.slots,
        max_model_len=spec.context,
    )
    loaded = load_model(config, attn_implementation=attention)
    manager = _make_manager(loaded.model, spec)
    start_manager(manager)
    _run_work(manager, [(PROMPT_TOKENS, 4)] * min(2, spec.slots), loaded.vocab_size, "warm")
    start_s = time.monotonic() - began
    seconds = {}
    for name, requests in spec.works:
        began = time.monotonic()
        _run_work(manager, [(prompt, new) for prompt, new in requests], loaded.vocab_size, name)
        seconds[name] = time.monotonic() - began
    batching = manager.continuous_batching_config
    shown = ("use_async_batching", "use_cuda_graph", "default_compile_level")
    found = {
        "attention": str(loaded.model.config._attn_implementation),
        "start_s": start_s,
        "seconds": seconds,
        "options": {name: getattr(batching, name, None) for name in shown},
        "torch": torch.__version__,
    }
    stop_manager(manager)
    return found


def _make_manager(model: Any, spec: PeerSpec) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 256
    # Its cache: what the slots can need, and some more, since its scheduler keeps a margin.
    blocks = 2 * spec.slots * -(-spec.context // page)
    options = {
        "page_size": page,
        "num_blocks": blocks,
        "max_requests_per_batch": spec.slots,
        "max_batch_tokens": max(2048, spec.slots),
        "allow_block_sharing": False,
        "use_async_batching": spec.device != "cpu",
        "use_cuda_graph": spec.graphs and spec.device != "cpu",
        "default_compile_level": spec.compile_level,
        "auto_switch_to_flash": False,  # it would ask a hub for kernels; what is installed was chosen already
    }
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    batching = ContinuousBatchingConfig(**{name: value for name, value in options.items() if name in known})
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)


def _run_work(manager: Any, requests: list[tuple[int, int]], vocabulary: int, name: str) -> None:
    prompts = Work(name, tuple(requests), 1).prompts(vocabulary)
    for index, (prompt, (_, new)) in enumerate(zip(prompts, requests, strict=True)):
        manager.add_request(list(prompt), request_id=f"{name}-{index}", max_new_tokens=new, eos_token_id=[-1])
    left = len(requests)
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread has ended")
        elif result.error is not None:
            raise RuntimeError(f"transformers failed a request: {result.error}")
        elif result.is_finished():
            left -= 1


def _tail(text: str | None) -> str:
    return "\n".join((text or "").strip().splitlines()[-8:])


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(run(PeerSpec(**given))), flush=True)
