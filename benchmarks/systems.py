"""The systems under comparison, behind one small interface: load, run a workload, close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from backend.api import GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.engine import AsyncEngine
from backend.loading import LoadedModel, load_model
from backend.transformers_manager import make_manager, start_manager, stop_manager
from benchmarks.workload import Work

Tokens = list[tuple[int, ...]]


class System(Protocol):
    """Something that continues prompts greedily, past any end-of-sequence token."""

    @property
    def name(self) -> str:
        """As it is called in the table."""

    def run(self, work: Work) -> Tokens:
        """Do all the work; the new tokens of each prompt, in order."""

    def close(self) -> None:
        """Give its threads and memory back."""


class StaticGenerate:
    """transformers' ``generate`` on batches in order of arrival, padded on the left.

    A batch runs until its longest member is complete; the surplus of the others is thrown away.
    """

    name = "transformers generate"

    def __init__(self, config: EngineConfig, batch: int) -> None:
        self._loaded = load_model(config, attn_implementation="sdpa")
        self._batch = batch
        # ``generate`` fills what its argument leaves unset from here, the end-of-sequence token included.
        self._loaded.model.generation_config.eos_token_id = None

    def run(self, work: Work) -> Tokens:
        """See ``System.run``."""
        import torch
        from transformers import GenerationConfig

        results: Tokens = []
        for start in range(0, len(work.prompts), self._batch):
            prompts = work.prompts[start : start + self._batch]
            lengths = work.new_tokens[start : start + self._batch]
            width = max(map(len, prompts))
            ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=self._loaded.device)
            mask = torch.tensor([(0,) * (width - len(p)) + (1,) * len(p) for p in prompts], device=ids.device)
            settings = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), pad_token_id=0)
            with torch.inference_mode():
                output = self._loaded.model.generate(ids, attention_mask=mask, generation_config=settings)
            rows = output[:, width:].tolist()
            results += [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        return results

    def close(self) -> None:
        """See ``System.close``."""
        del self._loaded


class ContinuousBatching:
    """transformers' continuous batching, driven directly and without streaming."""

    name = "transformers CB"

    def __init__(self, config: EngineConfig) -> None:
        self._loaded: LoadedModel = load_model(config, attn_implementation="sdpa")
        self._manager: Any = make_manager(self._loaded, config)
        start_manager(self._manager)
        self._runs = 0

    def run(self, work: Work) -> Tokens:
        """See ``System.run``."""
        self._runs += 1
        keys = [f"{self._runs}-{number}" for number in range(len(work.prompts))]
        for key, prompt, length in zip(keys, work.prompts, work.new_tokens, strict=True):
            self._manager.add_request(list(prompt), request_id=key, max_new_tokens=length, eos_token_id=[-1])
        done: dict[str, tuple[int, ...]] = {}
        while len(done) < len(keys):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers failed a request: {result.error}")
            if result.is_finished():
                done[result.request_id] = tuple(result.generated_tokens)
        return [done[key] for key in keys]

    def close(self) -> None:
        """See ``System.close``."""
        stop_manager(self._manager)


class Tokenmill:
    """This engine, through the interface that the worker uses."""

    def __init__(self, config: EngineConfig) -> None:
        self.name = f"tokenmill {config.mode}"
        self._engine = AsyncEngine(config)
        self._engine.start()

    def run(self, work: Work) -> Tokens:
        """See ``System.run``."""
        handles = [
            self._engine.submit(
                GenerationRequest(
                    request_id=str(number),
                    prompt=Prompt(token_ids=prompt),
                    sampling=SamplingParams(max_tokens=length, ignore_eos=True),
                )
            )
            for number, (prompt, length) in enumerate(zip(work.prompts, work.new_tokens, strict=True))
        ]
        return [handle.result().token_ids for handle in handles]

    def close(self) -> None:
        """See ``System.close``."""
        self._engine.shutdown(drain=False)


def builders(config: EngineConfig, batch: int) -> dict[str, Callable[[], System]]:
    """How to make each system, by the short name that the command line uses."""
    # No prefix cache: with it, the second repetition would skip the prefill that the first one paid for.
    ours = config.model_copy(update={"prefix_cache": False})
    return {
        "async": lambda: Tokenmill(ours.model_copy(update={"mode": "async"})),
        "sync": lambda: Tokenmill(ours.model_copy(update={"mode": "sync"})),
        "generate": lambda: StaticGenerate(config, batch),
        "cb": lambda: ContinuousBatching(ours),
    }
