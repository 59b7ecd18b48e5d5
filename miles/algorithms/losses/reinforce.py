"""The plain policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def reinforce(tokens: TrainedTokens, old: Tensor) -> TokenLoss:
    """-A logprobs. Unbiased for tokens that the current weights sampled; a correction makes up for older ones.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return TokenLoss(-tokens.advantages * tokens.logprobs)
