"""Sampling inside the graphs against the reference sampler on a CPU: every option, in mixed batches, to the token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import GenerationRequest, GenerationResult, Prompt, SamplingParams
from backend.engine import AsyncEngine
from tests.gpu.gpu_driver import make_config
from tests.gpu.gpu_models import VOCAB, save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = 48


def make_requests() -> list[GenerationRequest]:
    """Requests of any mix of options; some end at stop tokens, which some may not do before ``min_tokens``."""
    rng = random.Random(3)

    def some(count: int) -> list[int]:
        return rng.sample(range(VOCAB), count)

    requests = []
    for i in range(REQUESTS):
        options: dict[str, Any] = {
            "max_tokens": rng.randint(1, 60),
            "ignore_eos": True,
            "seed": rng.randrange(2**63),
        }
        if rng.random() < 0.6:
            options |= {"temperature": rng.uniform(0.3, 1.5)}
            options |= rng.choice(
                [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}]
            )
        if rng.random() < 0.5:
            options |= rng.choice(
                [
                    {"repetition_penalty": 1.3},
                    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
                    {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 1.1},
                ]
            )
        if rng.random() < 0.4:
            options["logit_bias"] = {token: rng.uniform(-9, 9) for token in some(rng.randint(1, 60))}
        if rng.random() < 0.6:
            options["stop_token_ids"] = tuple(some(60))
            options["min_tokens"] = rng.randint(0, options["max_tokens"])
        if rng.random() < 0.5:
            options["logprobs"] = rng.choice([0, 1, 5, 20])
        prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 150)))
        requests.append(
            GenerationRequest(
                request_id=str(i), prompt=Prompt(token_ids=prompt), sampling=SamplingParams(**options)
            )
        )
    return requests


def run(
    folder: Path, requests: list[GenerationRequest], **options: Any
) -> tuple[list[GenerationResult], int]:
    """Results of all, submitted at once, and how often one was preempted."""
    engine = AsyncEngine(make_config(folder, **options))
    engine.start()
    try:
        handles = [engine.submit(request) for request in requests]
        results = [handle.result(timeout=200) for handle in handles]
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        return results, stats.preemptions
    finally:
        engine.shutdown(drain=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[GenerationResult]:
    """What the reference sampler makes of the same requests on a CPU."""
    results, _ = run(folder, make_requests(), device="cpu", mode="sync")
    assert {r.finish_reason.value for r in results} == {"stop", "length"}
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "sync"},
        {"num_kv_blocks": 40},
        {"debug_delay": "compute:300"},
        {"debug_delay": "h2d:300"},
        {"max_num_seqs": 1},
        {"cuda_graphs": False},
    ],
    ids=str,
)
def test_every_option_samples_what_the_reference_sampler_does(
    folder: Path, expected: list[GenerationResult], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("cuda_graphs", True):  # nothing of the reference sampler may run
        monkeypatch.setattr("backend.sampling.Sampler.sample", None)
    results, preemptions = run(folder, make_requests(), **options)
    if "num_kv_blocks" in options:
        assert preemptions > 0
    for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.token_ids == wanted.token_ids, f"request {i}"
        assert result.finish_reason == wanted.finish_reason, f"request {i}"
        _check_logprobs(result, wanted)


def _check_logprobs(result: GenerationResult, wanted: GenerationResult) -> None:
    """Near enough for logits of another device; the same alternatives, but where two are that near, too."""
    assert (result.logprobs is None) == (wanted.logprobs is None)
    for entry, other in zip(result.logprobs or (), wanted.logprobs or (), strict=True):
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(entry.top) == len(other.top)
        for (token, value), (other_token, other_value) in zip(entry.top, other.top, strict=True):
            assert value == pytest.approx(other_value, abs=1e-4)
            assert token == other_token or any(t == token for t, _ in other.top) or entry.top[-1][0] == token
