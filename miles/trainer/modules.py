"""Megatron-core layer pieces that need no Transformer Engine, Apex or GPU; plugged in through the layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm; marks its weight so that sequence parallelism reduces its gradient over TP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(LocalRMSNorm):
    """Gemma's: multiplies by 1 + weight, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype as `x`."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class LocalRotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding that stays on the device of its frequencies; upstream moves them to the current GPU."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles [max_seq_len, 1, 1, d]."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class ScaleOutput:
    """A forward hook that multiplies a module's output, as Gemma does its embeddings: by the factor in its dtype."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        return output * torch.tensor(self.factor, dtype=output.dtype).item()
