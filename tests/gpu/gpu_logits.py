"""Looks at logits behind an engine: teacher-forced ones, and those of each graph's replays; and replays requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from backend.graphs import GraphKey, GraphRunner
from backend.runner import Runner, StepForward
from backend.sequence import Sequence
from backend.slots import LONG_PREFILL_TOKENS, Slot
from tests.gpu.gpu_driver import CoreDriver
from tests.gpu.gpu_models import DEVICE, VOCAB, native


class Spy:
    """A forward pass whose logits can be seen after a step, also when that was a graph's replay."""

    def __init__(self, forward: StepForward, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        self._forward = forward
        self.logits = torch.zeros(rows, vocab_size, dtype=dtype, device=DEVICE)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        logits = self._forward(*arguments)
        if len(logits) <= len(self.logits):
            self.logits[: len(logits)].copy_(logits)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


class Comparing:
    """Computes each graph's step again, uncaptured, up to twice for every key: sizes, slot."""

    def __init__(self, runner: GraphRunner, spy: Spy) -> None:
        self._runner = runner
        self._spy = spy
        self.found: dict[GraphKey, list[tuple[torch.Tensor, ...]]] = {}

    @torch.inference_mode()
    def execute(self, slot: Slot, previous: Slot | None) -> None:
        runner, inputs, plan = self._runner, slot.inputs, slot.plan
        runner.execute(slot, previous)
        assert inputs is not None
        assert plan is not None
        mixed = plan.num_decode < len(plan.sequences)
        slots = runner._slots
        key = GraphKey(mixed, len(inputs.input_ids), slots.index(slot), slot.shape.long_prefill)
        if len(self.found.get(key, ())) == 2 or not slot.sampled:
            return
        sampled = len(slot.sampled)
        replayed = self._spy.logits[:sampled].clone(), slot.device_tokens.clone()
        self._spy.logits.fill_(float("nan"))
        slot.device_tokens.fill_(-7)
        runner._compute(slot, slots[1 - key.slot], inputs, runner.padded_shape(key))
        again = self._spy.logits[:sampled].clone(), slot.device_tokens.clone()
        self.found.setdefault(key, []).append((*replayed, *again))

    def check(self) -> int:
        """All pairs are equal, to the bit; returns how many there are. Graphs that are not ``found`` have none."""
        different = [
            (key, (logits != again).sum().item(), (tokens != tokens_again).sum().item())
            for key, pairs in self.found.items()
            for logits, tokens, again, tokens_again in pairs
            if not (torch.equal(logits, again) and torch.equal(tokens, tokens_again))
        ]
        assert not different
        return sum(map(len, self.found.values()))


def fill_mixed_graphs(driver: CoreDriver, keys: list[GraphKey], rng: random.Random) -> None:
    """For each graph of mixed steps, run one that fills it and samples, beside a decode row where that leaves room.

    The driver must be idle, and is so again afterwards.
    """
    core = driver.core

    def add(length: int, max_tokens: int = 1) -> Sequence:
        return driver.add([rng.randrange(3, VOCAB) for _ in range(length)], max_tokens=max_tokens)

    def beside_a_row(key: GraphKey) -> bool:
        return not key.long_prefill or key.size > LONG_PREFILL_TOKENS

    row = add(3, max_tokens=4 * len(keys) + 10)
    for _ in range(3):
        core.step()
    for key in filter(beside_a_row, keys):
        if core._next != key.slot:
            core.step()
        rest, most = key.size - 1, key.size if key.long_prefill else LONG_PREFILL_TOKENS - 1
        for at in range(0, rest, most):
            add(min(most, rest - at))
        core.step()
    assert row.finish_reason is None
    driver.run()
    for key in keys:
        if not beside_a_row(key):
            if core._next != key.slot:
                add(3)
                driver.run()
            add(key.size)
            driver.run()


class TeacherForcing:
    """Keeps each step's logits, and replaces its tokens by those that a text goes on with."""

    def __init__(self, runner: Runner, spy: Spy, texts: dict[int, list[int]]) -> None:
        self._runner = runner
        self._spy = spy
        self._texts = texts
        self.logits: dict[tuple[int, int], torch.Tensor] = {}  # by sequence number and position of the text

    @torch.inference_mode()
    def execute(self, slot: Slot, previous: Slot | None) -> None:
        self._runner.execute(slot, previous)
        logits = self._spy.logits[: len(slot.sampled)].clone()
        forced = []
        for sequence, row in zip(slot.sampled, logits, strict=True):
            position = len(sequence.prompt_ids) + len(sequence.output_ids) + sequence.in_flight - 1
            self.logits[sequence.number, position] = row
            forced.append(self._texts[sequence.number][position])
        slot.device_tokens.copy_(torch.tensor(forced, dtype=torch.int32))


def forced_logits(
    folder: Path | str, texts: list[list[int]], prompts: list[int], spies: list[Spy], **options: Any
) -> list[torch.Tensor]:
    """The engine's logits for each text from the last token of its prompt (of so many tokens) on, float32."""
    driver = CoreDriver(folder, dtype="bfloat16", **options)
    sequences = {}
    for text, prompt in zip(texts, prompts, strict=True):
        sequence = driver.add(text[:prompt], max_tokens=len(text) - prompt)
        sequences[sequence.number] = text
    forcing = TeacherForcing(driver.core._runner, spies[-1], sequences)
    driver.core._runner = forcing
    driver.run()
    return [
        torch.stack([forcing.logits[number, position] for position in range(prompt, len(text))]).float()
        for (number, text), prompt in zip(sequences.items(), prompts, strict=True)
    ]


def errors(
    folder: Path | str, texts: list[list[int]], prompts: list[int], ours: list[torch.Tensor]
) -> tuple[float, float, float, float]:
    """Root-mean-square and largest error of our logits and of transformers' in bfloat16, against its float32."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = native(folder, dtype)
        if dtype == torch.float32:  # of the very weights that bfloat16 has
            model.load_state_dict({name: t.bfloat16().float() for name, t in model.state_dict().items()})
        with torch.inference_mode():
            found[dtype] = [
                model(torch.tensor([text], device=DEVICE), use_cache=False).logits[0, prompt - 1 : -1].float()
                for text, prompt in zip(texts, prompts, strict=True)
            ]
    exact = torch.cat(found[torch.float32])
    differences = [torch.cat(logits) - exact for logits in (ours, found[torch.bfloat16])]
    rms, most = zip(
        *((d.pow(2).mean().sqrt().item(), d.abs().max().item()) for d in differences), strict=True
    )
    return rms[0], rms[1], most[0], most[1]


def alone_and_among_others(
    folder: Path | str, prompts: list[list[int]], sampling: list[dict[str, Any]], **options: Any
) -> tuple[list[Sequence], list[Sequence]]:
    """Each request by itself, and all of them again in another order, joining at any step, among strangers."""
    driver = CoreDriver(folder, prefix_cache=False, **options)
    alone = []
    for prompt, params in zip(prompts, sampling, strict=True):
        alone.append(driver.add(prompt, **params))
        driver.run()
    rng = random.Random(6)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    again: dict[int, Sequence] = {}
    vocab_size = driver.parts.loaded.vocab_size
    while len(again) < len(order) or driver.core.has_work():
        if len(again) < len(order) and rng.random() < 0.4:
            i = order[len(again)]
            again[i] = driver.add(prompts[i], **sampling[i])
        if rng.random() < 0.1:
            stranger = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 100))]
            driver.add(stranger, max_tokens=rng.randint(1, 20), temperature=1.0, seed=1, top_k=5)
        driver.core.step()
    driver.core.check_idle()
    return alone, [again[i] for i in range(len(prompts))]
