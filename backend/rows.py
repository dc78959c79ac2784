"""Host-side state of the running sequences as arrays, one row each, so that a batch is gathered in a few steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backend.sequence import Sequence


class RowTable:
    """Block tables and sampling parameters by row. A row belongs to a sequence from admission to its end.

    Arrays have ``max_num_seqs`` rows; ``blocks`` is int32 ``[rows, max_blocks]``.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        def ints(*shape: int) -> NDArray[np.int32]:
            return np.zeros(shape, dtype=np.int32)

        def floats() -> NDArray[np.float32]:
            return np.zeros(max_num_seqs, dtype=np.float32)

        self.blocks = ints(max_num_seqs, max_blocks)
        self.num_blocks = [0] * max_num_seqs  # entries of ``blocks`` that are filled in
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_k = ints(max_num_seqs)
        self.penalty_row = ints(max_num_seqs)  # the row itself, or -1
        self.logprobs = ints(max_num_seqs)  # alternatives asked for, or -1
        self.min_tokens = ints(max_num_seqs)
        self.has_bias = np.zeros(max_num_seqs, dtype=np.bool_)
        self.temperature = floats()
        self.top_p = floats()
        self.min_p = floats()
        self.repetition_penalty = floats()
        self.presence_penalty = floats()
        self.frequency_penalty = floats()

    def update(self, sequence: Sequence) -> None:
        """Bring a row up to date: parameters when its owner is new, and blocks that it has gained."""
        row = sequence.row
        if not sequence.row_filled:
            self._take(row, sequence)
            sequence.row_filled = True
        have, blocks = self.num_blocks[row], sequence.blocks
        if have != len(blocks):
            self.blocks[row, have : len(blocks)] = blocks[have:]
            self.num_blocks[row] = len(blocks)

    def _take(self, row: int, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self.num_blocks[row] = 0
        self.seed[row] = sequence.seed
        self.top_k[row] = sampling.top_k
        self.penalty_row[row] = row if sampling.uses_penalties else -1
        self.logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.min_tokens[row] = sampling.min_tokens
        self.has_bias[row] = bool(sampling.logit_bias)
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
