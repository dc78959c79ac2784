"""Steps as the engine lays them out, made without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backend.slots import StepInputs, StepShape, is_long_prefill


@dataclass(slots=True)
class Step:
    """One step's inputs, as the engine would lay them out, with random tokens and shuffled blocks."""

    tokens: Tensor
    inputs: StepInputs
    shape: StepShape
    num_blocks: int

    @classmethod
    def of(cls, chunks: list[tuple[int, int]], *, block_size: int, vocabulary: int, device: str) -> Step:
        """Rows of ``(tokens to compute, tokens cached)``; those with one token decode and come first."""
        new, cached = (np.array(column, dtype=np.int32) for column in zip(*chunks, strict=True))
        decode = int((new == 1).sum())
        if (new[:decode] != 1).any():
            raise ValueError("rows that decode must come first")
        lengths = new + cached
        starts = np.zeros(len(new) + 1, dtype=np.int32)
        np.cumsum(new, out=starts[1:])
        rows = np.repeat(np.arange(len(new)), new)
        positions = (np.arange(starts[-1]) - starts[rows] + cached[rows]).astype(np.int32)
        width = -(-int(lengths.max()) // block_size)
        table = np.random.default_rng(0).permutation(len(new) * width).astype(np.int32).reshape(-1, width)
        slots = table[rows, positions // block_size] * block_size + positions % block_size
        carried = np.full(len(positions), -1, dtype=np.int32)
        decoding = np.arange(len(new)) < decode

        def put(values: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

        tokens = torch.randint(vocabulary, (len(positions),), dtype=torch.int32, device=device)
        none = torch.empty(0, dtype=torch.int32, device=device)
        inputs = StepInputs(
            input_ids=tokens,
            positions=put(positions),
            carry_over=put(carried),
            cache_slots=put(slots),
            query_starts=put(starts),
            kv_lengths=put(lengths),
            decode_lengths=put(np.where(decoding, lengths, 0)),
            prefill_starts=put(np.maximum(starts, decode)),
            block_table=put(table),
            sample_tokens=put(starts[1:] - 1),
            seeds=none.long(),
            params=none,
            lists=none,
            packed=none,
        )
        shape = StepShape(
            num_decode=decode,
            has_prefill=len(new) > decode,
            long_prefill=is_long_prefill(new[decode:].tolist()),
            query_lengths=new.tolist(),
            kv_lengths=lengths.tolist(),
        )
        return cls(tokens, inputs, shape, table.size)
