"""Host-side state of the running sequences as arrays, one row each, so that a batch is gathered in a few steps."""

from __future__ import annotations

import numpy as np

from backend.row_params import NUM_LASTING, RowParam
from backend.sequence import Sequence


class RowTable:
    """Block tables and sampling parameters by row. A row belongs to a sequence from admission to its end.

    Arrays have ``max_num_seqs`` rows; ``blocks`` is int32 ``[rows, max_blocks]``.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.blocks = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = [0] * max_num_seqs  # entries of ``blocks`` that are filled in
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.has_bias = np.zeros(max_num_seqs, dtype=np.bool_)
        # The parameters that travel, gathered for a step in one go. The arrays below are views of its rows.
        self.params = np.zeros((NUM_LASTING, max_num_seqs), dtype=np.int32)
        floats = self.params.view(np.float32)
        self.temperature = floats[RowParam.TEMPERATURE]
        self.top_k = self.params[RowParam.TOP_K]
        self.top_p = floats[RowParam.TOP_P]
        self.min_p = floats[RowParam.MIN_P]
        self.repetition_penalty = floats[RowParam.REPETITION_PENALTY]
        self.presence_penalty = floats[RowParam.PRESENCE_PENALTY]
        self.frequency_penalty = floats[RowParam.FREQUENCY_PENALTY]
        self.penalty_row = self.params[RowParam.PENALTY_ROW]  # the row itself, or -1
        self.logprobs = self.params[RowParam.LOGPROBS]  # alternatives asked for, or -1

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
