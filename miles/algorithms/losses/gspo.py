"""GSPO: importance ratios of whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Clip
from miles.algorithms.tokens import TokenLoss, TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def gspo(tokens: TrainedTokens, old: Tensor, *, clip: Clip = (3e-4, 4e-4)) -> TokenLoss:
    """-min(s A, clip(s, 1 - low, 1 + high) A), where s is the sequence's ratio to the power of 1 / its length:
    s = exp(mean over its trained tokens of (logprobs - old)), `clip` = (low, high).

    In the form by token (GSPO-token): s_t = sg[s] * exp(logprobs - sg[logprobs]), sg being the value without gradient.
    It is equal in value, and under `aggregation: sequence_mean`, that of the paper, in gradient where the advantage is
    the same all over the sequence. Source: arXiv 2507.18071.
    """
    low, high = clip
    advantages = tokens.advantages
    current = tokens.logprobs.detach()
    ratio = ratio_of(tokens.sequence_means(current - old) + tokens.logprobs - current)
    gains = (ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    moved = ratio.detach()
    metrics = {
        "ratio_mean": moved,
        "clip_low": ((moved < 1.0 - low) & (advantages < 0)).float(),
        "clip_high": ((moved > 1.0 + high) & (advantages > 0)).float(),
    }
    return TokenLoss(-gains, metrics, {"ratio_max": moved})
