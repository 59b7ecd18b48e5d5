"""Core attention of the Megatron model over torch's kernels, for batches and for packed sequences.

On a GPU in bf16, packed sequences are one call of the flash kernel. Elsewhere they cost one SDPA call per run of
equally long neighbours, so packers sort by length. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from miles.trainer.context_parallel import attend_own_chunks


@dataclass
class PackedRuns(PackedSeqParams):  # type: ignore[misc]
    """Packed (`thd`) sequences that know, on the host, their runs of equal length: (count, length) in order."""

    runs: tuple[tuple[int, int], ...] = ()
    positions: Tensor | None = None
    """[t]: where in its sequence each token stands."""
    routing: Tensor | None = None
    """int16 [t, layers * top_k]: the experts to replay for each token, -1 where there is no record."""


def pack_params(lengths: list[int], device: torch.device, routing: Tensor | None = None) -> PackedRuns:
    """Parameters for sequences of these lengths (each at least 1) laid end to end; see PackedRuns for `routing`."""
    cumulative = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    cumulative = cumulative.to(device)
    return PackedRuns(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        runs=tuple((len(list(same)), length) for length, same in groupby(lengths)),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        routing=None if routing is None else routing.to(device),
    )


def _last_queries(count: int, queries: int, keys: int, device: torch.device) -> PackedRuns:
    """Parameters for `count` sequences of which only the last `queries` of `keys` tokens ask."""
    steps = torch.arange(count + 1, dtype=torch.int32, device=device)
    return PackedRuns(
        qkv_format="thd",
        cu_seqlens_q=steps * queries,
        cu_seqlens_kv=steps * keys,
        max_seqlen_q=queries,
        max_seqlen_kv=keys,
    )


FLASH_DTYPES = (torch.bfloat16, torch.float16)


class SdpaCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal core attention over torch's SDPA, for one `sbhd` batch or for packed `thd` sequences."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None:
            raise ValueError("sliding windows are not supported")
        self.softmax_scale = softmax_scale
        self._cp_group = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRuns | None = None,
    ) -> Tensor:
        """`thd`: q [t, heads, d], k/v [t, groups, d] -> [t, heads * d]. `sbhd`: the same with [s, b, ...]."""
        if attention_bias is not None or attention_mask is not None:
            raise ValueError("only causal masks are supported")
        if self._cp_group is not None and self._cp_group.size() > 1:
            if packed_seq_params is None:
                raise ValueError("context parallelism is for packed sequences")
            runs = packed_seq_params.runs
            return attend_own_chunks(query, key, value, runs, self._cp_group, self._attend_last).flatten(1)
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3)
            return out.reshape(*out.shape[:2], -1)
        if query.is_cuda and query.dtype in FLASH_DTYPES:
            return self._attend_packed(query, key, value, packed_seq_params).flatten(1)
        pieces, start = [], 0
        for count, length in packed_seq_params.runs:
            end = start + count * length
            q, k, v = (x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            pieces.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1))
            start = end
        return torch.cat(pieces)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d], [b, groups, s, d] twice -> [b, heads, s, d]."""
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped, scale=self.softmax_scale
        )

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of queries that are the last tokens of their keys: [b, s, heads, d], [b, k, groups, d] twice -> the first."""
        count, length, keys = query.shape[0], query.shape[1], key.shape[1]
        if query.is_cuda and query.dtype in FLASH_DTYPES:
            packed = _last_queries(count, length, keys, query.device)
            flat = self._attend_packed(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), packed)
            return flat.view(query.shape)
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=grouped, scale=self.softmax_scale
        )
        return out.transpose(1, 2)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRuns) -> Tensor:
        """[t, heads, d], [t, groups, d] twice -> [t, heads, d]. The public `varlen_attn` of torch changes its
        signature with every release and lacks grouped heads in some; this operator beneath it has kept its own."""
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            0.0,
            True,
            False,
            scale=self.softmax_scale,
        )[0]
        return out
