"""Token losses. Each returns a value per token; the trainer sums them over all micro-batches and ranks and divides by
the number of trained tokens of the whole batch, so how the batch is cut never changes the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Keeps exp() finite for a token whose probability has changed beyond reason."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`values` [n] is differentiable; `metrics` are [n] tensors to be averaged over trained tokens."""

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def clipped(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip: tuple[float, float]) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip[0], 1 + clip[1]) A), r = exp(logprobs - behaviour); all [n].

    `behaviour` are the logprobs the engine sampled under, `logprobs` the trainer's at the same temperature.
    Source: PPO (arXiv 1707.06347), token-level with asymmetric bounds as in DAPO (arXiv 2503.14476).
    """
    ratio = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1.0 - clip[0], 1.0 + clip[1])
    values = -torch.minimum(ratio * advantages, bounded * advantages)
    with torch.no_grad():
        cut = ((ratio > 1.0 + clip[1]) & (advantages > 0)) | ((ratio < 1.0 - clip[0]) & (advantages < 0))
    return TokenLoss(values, {"ratio_mean": ratio.detach(), "clip_fraction": cut.float()})


def supervised(logprobs: Tensor) -> TokenLoss:
    """Negative log-likelihood, [n]: the supervised warm-up."""
    return TokenLoss(-logprobs)
