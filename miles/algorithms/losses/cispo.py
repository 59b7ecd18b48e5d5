"""CISPO: the importance weight is clipped, so no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Clip
from miles.algorithms.tokens import TokenLoss, TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def cispo(tokens: TrainedTokens, old: Tensor, *, clip: Clip = (1.0, 4.0)) -> TokenLoss:
    """-sg[clip(r, 1 - low, 1 + high)] A logprobs, with r = exp(logprobs - old), sg the value without gradient.

    `clip` = (low, high); low = 1 leaves small ratios as they are, as the paper does. The paper gives no number for
    the upper bound; 1 + 4 is within the range that ScaleRL (arXiv 2510.13786) found to make no difference.
    Source: MiniMax-M1 (arXiv 2506.13585).
    """
    low, high = clip
    ratio = ratio_of(tokens.logprobs.detach() - old)
    values = -ratio.clamp(1.0 - low, 1.0 + high) * tokens.advantages * tokens.logprobs
    return TokenLoss(values, {"clip_low": (ratio < 1.0 - low).float(), "clip_high": (ratio > 1.0 + high).float()})
