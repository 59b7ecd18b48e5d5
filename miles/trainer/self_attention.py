"""Self-attention whose steps between the two projections are one fused function on a GPU: cut, norm, rotate.

Upstream's own steps are a dozen kernels, and for packed sequences each layer waits for the device to learn their
lengths. Everything else (CPU, unpacked batches, context parallelism) goes upstream's way. `model` puts it in the spec.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from miles.trainer.attention import PackedRuns
from miles.trainer.compiled import fused


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Same parameters, names and results as upstream's."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedRuns | None = None,
        **rest: Any,
    ) -> Any:
        """[t, 1, hidden] (or its share of t under sequence parallelism) -> the same shape, and a bias or None."""
        if not self._fusable(hidden_states, rotary_pos_emb, packed_seq_params):
            return super().forward(
                hidden_states,
                attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **rest,
            )
        assert packed_seq_params is not None and rotary_pos_emb is not None
        mixed, _ = self.linear_qkv(hidden_states)
        angles = rotary_pos_emb.flatten(1)
        query, key, value = fused(
            cut_norm_rotate,
            mixed.view(mixed.shape[0], self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head),
            angles.cos(),
            angles.sin(),
            packed_seq_params.positions,
            _weight(self.q_layernorm),
            _weight(self.k_layernorm),
            self.config.layernorm_epsilon,
        )
        out = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out.unsqueeze(1))

    def _fusable(self, hidden_states: Tensor, angles: Any, packed: PackedRuns | None) -> bool:
        return (
            hidden_states.is_cuda
            and packed is not None
            and packed.positions is not None
            and isinstance(angles, Tensor)
            and angles.shape[-1] == self.hidden_size_per_attention_head
            and self.pg_collection.cp.size() == 1
            and self.config.num_query_groups >= self.world_size
            and not self.config.layernorm_zero_centered_gamma
        )


def _weight(norm: torch.nn.Module | None) -> Tensor | None:
    """None for no norm, and for the identity that stands for it in a layer spec."""
    return getattr(norm, "weight", None)


def cut_norm_rotate(
    mixed: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [t, heads, d], keys and values [t, groups, d] out of `mixed` [t, groups, heads / groups + 2, d].

    Queries and keys are RMS-normed where there is a weight [d], then rotated by cos and sin [positions, d] (RoFormer,
    arXiv 2104.09864, halves paired as in GPT-NeoX). Arithmetic is in fp32; results have the dtype of `mixed`.
    """
    cosine, sine = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    query = _norm_rotate(mixed[:, :, :-2].flatten(1, 2), query_norm, eps, cosine, sine)
    key = _norm_rotate(mixed[:, :, -2], key_norm, eps, cosine, sine)
    return query, key, mixed[:, :, -1].clone()


def _norm_rotate(heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    values = heads.float()
    if weight is not None:
        values = F.rms_norm(values, weight.shape, weight.float(), eps)
    first, second = values.chunk(2, dim=-1)
    return (values * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)
