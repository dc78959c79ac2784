"""The sampling parameters of a step as one int32 matrix ``[parameters, rows]``, the form in which they travel.

A row of the matrix is a parameter, a column a row that samples; floats lie there as their bits. Next to it travel
the rows' 64-bit seeds, and the entries of biases and bans as pairs of words, a token id and the bits of what is
added to its logit.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class RowParam(IntEnum):
    """Rows of the matrix."""

    TEMPERATURE = 0  # float; 0 is greedy
    TOP_K = 1  # 0 keeps all
    TOP_P = 2  # float; 1 keeps all
    MIN_P = 3  # float; 0 keeps all
    REPETITION_PENALTY = 4  # float; 1 is none
    PRESENCE_PENALTY = 5  # float
    FREQUENCY_PENALTY = 6  # float
    PENALTY_ROW = 7  # row of the token counts, -1 for none
    LOGPROBS = 8  # alternatives to report, 0: the sampled token's log-probability only, -1: nothing
    # Above: the same for all steps of a sequence. Below: of one step.
    OUTPUT_INDEX = 9  # index, from 0, of the token to be sampled among the sequence's new tokens
    BIAS_START = 10  # entries BIAS_START … BAN_START - 1 are biases,
    BAN_START = 11  # entries BAN_START … LIST_END - 1 are bans
    LIST_END = 12


NUM_LASTING = int(RowParam.OUTPUT_INDEX)
NUM_PARAMS = len(RowParam)


def padding_column() -> NDArray[np.int32]:
    """Parameters of a row that is nobody's: greedy, plain."""
    column = np.zeros(NUM_PARAMS, dtype=np.int32)
    ones = column.view(np.float32)
    ones[[RowParam.TOP_P, RowParam.REPETITION_PENALTY]] = 1.0
    column[[RowParam.PENALTY_ROW, RowParam.LOGPROBS]] = -1
    return column
