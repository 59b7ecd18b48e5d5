"""Mixture-of-experts pieces of Megatron-core that need neither Transformer Engine nor a GPU.

Tokens go to the experts by all-to-all on every device, so that data-parallel ranks may hold different token counts.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class PortableTopKRouter(TopKRouter):  # type: ignore[misc]
    """Upstream's gate moves its weight to a GPU and needs Transformer Engine; this is the same product, in fp32."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [s, b, experts] in fp32 of `input` [s, b, hidden]."""
        return F.linear(input.float(), self.weight.float())


class HostDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """The all-to-all dispatcher of tensors that are on the CPU already: no copies from the device, no streams."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if isinstance(splits, Tensor):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert
