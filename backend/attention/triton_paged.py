"""Attention on a GPU by our own Triton kernels: split-KV decode, and prefill over rows of any length.

Nothing is planned on the host: lengths, tables and row borders are read on the device, so a captured launch serves
every step of its padded size. The exception is another kernel for the prefill of long rows, where there is one.
"""

from __future__ import annotations

from typing import Any

import torch

from backend.attention.flashinfer_prefill import FlashInferPrefill
from backend.attention.interface import AttentionParams
from backend.kv_cache import KVCache
from backend.slots import LONG_PREFILL_ROWS, StepInputs, StepShape


def early_launch(device: torch.device) -> bool:
    """Whether kernels start while the one before them ends, which Hopper and later devices can do."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


class TritonKernel:
    """Decode rows by ``paged_decode``, prefill rows by ``paged_prefill``, into one output."""

    name = "triton"

    def __init__(
        self,
        *,
        row_sizes: list[int],
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        long_prefill: FlashInferPrefill | None = None,
    ) -> None:
        """``long_prefill`` attends in steps that it has planned, in layers that suit it."""
        from backend.kernels.paged_decode import DecodeWorkspace, decode_config
        from backend.kernels.paged_prefill import prefill_config

        self.long_prefill = long_prefill
        self._pdl = early_launch(device)
        # The launch constants of each padded row count: a graph holds them whatever the lengths become.
        self._configs = {
            rows: decode_config(
                rows,
                max_model_len,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
                pdl=self._pdl,
            )
            for rows in row_sizes
        }
        group = num_heads // num_kv_heads
        self._prefill_configs = {
            long: prefill_config(group, head_size, dtype, long=long) for long in (False, True)
        }
        most = max(rows * config.splits for rows, config in self._configs.items())
        max_rows = max(row_sizes)
        self._workspace = DecodeWorkspace(max_rows, num_heads, head_size, -(-most // max_rows), device)

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        cache: KVCache,
        inputs: StepInputs,
        shape: StepShape,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionKernel.attend``."""
        from backend.kernels.paged_decode import paged_decode
        from backend.kernels.paged_prefill import paged_prefill

        keys, values = cache.keys[layer], cache.values[layer]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows = min(inputs.decode_lengths.shape[0], query.shape[0])
        if shape.num_decode:
            # Rows without a decode token yield zeros here; where they prefill, those are overwritten below.
            paged_decode(
                query[:rows],
                keys,
                values,
                inputs.block_table[:rows],
                inputs.decode_lengths[:rows],
                scale=params.scaling,
                workspace=self._workspace,
                config=self._config_for(rows),
                window=params.window,
                softcap=params.softcap,
                sinks=params.sinks,
                output=output[:rows],
                pdl=self._pdl,
            )
        planned = self.long_prefill
        if planned is not None and shape.planned_slot is not None and planned.suits(params):
            planned.run(
                query,
                keys,
                values,
                inputs.block_table,
                slot=shape.planned_slot,
                scale=params.scaling,
                output=output,
            )
        elif shape.has_prefill:
            paged_prefill(
                query,
                keys,
                values,
                inputs.block_table,
                inputs.prefill_starts,
                inputs.kv_lengths,
                config=self._prefill_configs[shape.long_prefill],
                most_rows=LONG_PREFILL_ROWS if shape.long_prefill else None,
                scale=params.scaling,
                window=params.window,
                softcap=params.softcap,
                sinks=params.sinks,
                output=output,
                pdl=self._pdl,
            )
        return output

    def _config_for(self, rows: int) -> Any:
        found = self._configs.get(rows)
        return found if found is not None else self._configs[min(s for s in self._configs if s >= rows)]
