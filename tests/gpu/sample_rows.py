"""Rows of sampling parameters for kernel tests, as the kernels and as the reference sampler take them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from backend.row_params import RowParam, padding_column
from backend.runner import sampling_batch
from backend.sampling import PenaltyState, SampledTokens, Sampler, SamplingBatch
from backend.slots import StepInputs, StepShape

ALTERNATIVES = 20


@dataclass(frozen=True)
class Row:
    """What one row asks for."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    logprobs: int = -1

    @property
    def penalised(self) -> bool:
        """Whether it has a penalty row."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


class Case:
    """Rows over logits, sampled by the kernels and by the reference; penalty rows last from step to step."""

    def __init__(self, rows: list[Row], vocab: int, device: str, *, padding: int = 0) -> None:
        from backend.kernels.sample import SampleWorkspace
        from backend.kernels.token_counts import start_rows

        self.rows, self.vocab, self.device = rows, vocab, torch.device(device)
        count = len(rows) + padding
        self.workspace = SampleWorkspace(count + 1, vocab, self.device)
        self.workspace.counts.fill_(12345)  # whoever reads what was never written will notice
        self.workspace.scores.fill_(float("nan"))
        self.state = PenaltyState(count + 1, vocab, self.device)
        # Penalty rows in another order than the batch's.
        self._state_rows = {i: len(rows) - i for i, row in enumerate(rows) if row.penalised}
        headers, tokens = [], []
        at = 4 * len(self._state_rows)
        for i, state_row in self._state_rows.items():
            prompt, output = rows[i].prompt, rows[i].output
            headers.append((state_row, at, at + len(prompt), at + len(prompt) + len(output)))
            tokens += [*prompt, *output]
            at += len(prompt) + len(output)
            self.state.init_row(state_row, self._ids(prompt), self._ids(output))
        words = [7, 7, 7, *(word for header in headers for word in header), *tokens]
        packed = torch.tensor(words, dtype=torch.int32, device=self.device)
        start_rows(packed, 3, len(headers), self.workspace.counts)
        self._inputs, self._shape = self._pack(count)
        self.sampler = Sampler(vocab, self.device, self.state)

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _pack(self, count: int) -> tuple[StepInputs, StepShape]:
        params = np.repeat(padding_column()[:, None], count, axis=1)
        floats = params.view(np.float32)
        pairs: list[tuple[int, float]] = [(3, 99.0)]  # an entry that is nobody's
        for i, row in enumerate(self.rows):
            floats[RowParam.TEMPERATURE, i] = row.temperature
            params[RowParam.TOP_K, i] = row.top_k
            floats[RowParam.TOP_P, i] = row.top_p
            floats[RowParam.MIN_P, i] = row.min_p
            floats[RowParam.REPETITION_PENALTY, i] = row.repetition
            floats[RowParam.PRESENCE_PENALTY, i] = row.presence
            floats[RowParam.FREQUENCY_PENALTY, i] = row.frequency
            params[RowParam.PENALTY_ROW, i] = self._state_rows.get(i, -1)
            params[RowParam.LOGPROBS, i] = row.logprobs
            params[RowParam.OUTPUT_INDEX, i] = row.index
            params[RowParam.BIAS_START, i] = len(pairs)
            pairs += row.bias.items()
            params[RowParam.BAN_START, i] = len(pairs)
            pairs += [(token, float("-inf")) for token in row.banned]
            params[RowParam.LIST_END, i] = len(pairs)
        words = np.empty((len(pairs), 2), dtype=np.int32)
        words[:, 0] = [token for token, _ in pairs]
        words[:, 1] = np.array([value for _, value in pairs], dtype=np.float32).view(np.int32)
        seeds = np.array([row.seed for row in self.rows] + [0] * (count - len(self.rows)), dtype=np.int64)
        empty = torch.empty(0, dtype=torch.int32)
        names = StepInputs.__dataclass_fields__.keys() - {"seeds", "params", "lists"}
        inputs = StepInputs(
            seeds=torch.from_numpy(seeds).to(self.device),
            params=torch.from_numpy(params).to(self.device),
            lists=torch.from_numpy(words.reshape(-1)).to(self.device),
            **dict.fromkeys(names, empty),
        )
        real = params[:, : len(self.rows)].copy()
        return inputs, StepShape(num_logprobs=int(real[RowParam.LOGPROBS].max()), params=real)

    def ours(self, logits: Tensor) -> tuple[list[int], Tensor]:
        """Tokens and records [rows, 1 + 2 * ALTERNATIVES] of the kernels; ``logits`` have rows for the padding."""
        output, records = self._blank(len(logits))
        before = logits.clone()
        self.launch(logits, output, records)
        assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
        return output[: len(self.rows)].tolist(), records[: len(self.rows)]

    def _blank(self, count: int) -> tuple[Tensor, Tensor]:
        output = torch.full((count,), -77, dtype=torch.int32, device=self.device)
        records = torch.full((count, 1 + 2 * ALTERNATIVES), -7, dtype=torch.int32, device=self.device)
        return output, records

    def launch(self, logits: Tensor, output: Tensor, records: Tensor, *, pdl: bool = False) -> None:
        """The kernels alone."""
        from backend.kernels.sample import sample

        sample(
            logits,
            self._inputs.seeds,
            self._inputs.params,
            self._inputs.lists,
            workspace=self.workspace,
            output=output,
            records=records,
            alternatives=ALTERNATIVES,
            pdl=pdl,
        )

    def captured(self, logits: Tensor) -> Callable[[], tuple[list[int], Tensor]]:
        """The kernels in a graph, with dependent launch; the function replays it."""
        output, records = self._blank(len(logits))
        self.launch(logits, output, records, pdl=True)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.launch(logits, output, records, pdl=True)

        def replay() -> tuple[list[int], Tensor]:
            output.fill_(-77)
            records.fill_(-7)
            graph.replay()
            return output[: len(self.rows)].tolist(), records[: len(self.rows)]

        return replay

    def batch(self) -> SamplingBatch:
        """The rows as the reference sampler takes them."""
        return sampling_batch(self._inputs, self._shape)

    def reference(self, logits: Tensor) -> SampledTokens:
        """What the reference sampler makes of the same."""
        return self.sampler.sample(logits[: len(self.rows)], self.batch())

    def check(self, logits: Tensor) -> list[int]:
        """One step by both: equal tokens and counts, log-probabilities as near as float32 allows. Returns tokens."""
        tokens, records = self.ours(logits)
        expected = self.reference(logits)
        assert tokens == expected.token_ids.tolist()
        for i, state_row in self._state_rows.items():
            words = self.workspace.counts[state_row]
            assert torch.equal(words & 0x7FFFFFFF, self.state.output_counts[state_row]), f"counts of row {i}"
            assert torch.equal(words < 0, self.state.prompt_mask[state_row]), f"prompt of row {i}"
        for i, row in enumerate(self.rows):
            self._check_record(i, row, tokens[i], records[i], expected)
        return tokens

    def _check_record(self, i: int, row: Row, token: int, record: Tensor, expected: SampledTokens) -> None:
        if row.logprobs < 0 or token < 0:
            assert (record == -7).all()
            return
        floats = record.view(torch.float32)
        width = min(row.logprobs, self.vocab)
        assert expected.logprobs is not None
        torch.testing.assert_close(floats[0], expected.logprobs[i], rtol=1e-5, atol=2e-6)
        end = 1 + row.logprobs
        assert (record[1 + width : end] == -1).all()
        assert (record[end : 1 + ALTERNATIVES] == -7).all()
        if width:
            assert expected.top_ids is not None
            assert expected.top_logprobs is not None
            assert record[1 : 1 + width].tolist() == expected.top_ids[i, :width].tolist()
            values = floats[1 + ALTERNATIVES : 1 + ALTERNATIVES + width]
            torch.testing.assert_close(values, expected.top_logprobs[i, :width], rtol=1e-5, atol=2e-6)


def random_row(draw: random.Random, vocab: int, **fixed: object) -> Row:
    """A row with each option on or off at random."""

    def maybe(value: object, neutral: object, chance: float = 0.5) -> object:
        return value if draw.random() < chance else neutral

    def some(most: int) -> tuple[int, ...]:
        return tuple(draw.sample(range(vocab), min(draw.randint(1, most), vocab - 1)))

    options: dict[str, object] = {
        "temperature": maybe(draw.uniform(0.2, 2.0), 0.0, 0.7),
        "top_k": maybe(draw.randint(1, min(vocab, 200)), 0),
        "top_p": maybe(draw.uniform(0.05, 0.999), 1.0),
        "min_p": maybe(draw.uniform(0.001, 0.3), 0.0, 0.3),
        "seed": draw.randrange(2**63),
        "index": draw.randrange(2**20),
        "repetition": maybe(draw.uniform(0.5, 2.0), 1.0, 0.3),
        "presence": maybe(draw.uniform(-2, 2), 0.0, 0.3),
        "frequency": maybe(draw.uniform(-2, 2), 0.0, 0.3),
        "bias": maybe({token: draw.uniform(-100, 100) for token in some(300)}, {}, 0.4),
        "banned": maybe(some(70), (), 0.4),
        "prompt": tuple(draw.choices(range(vocab), k=draw.randint(1, 5000))),
        "output": tuple(draw.choices(range(min(vocab, 40)), k=draw.randint(0, 300))),
        "logprobs": draw.choice([-1, 0, 1, 5, 20]),
    }
    return Row(**{**options, **fixed})  # type: ignore[arg-type]
