"""Supervised fine-tuning: the loss of the warm-up, and of a run that imitates its samples whatever their reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def supervised(tokens: TrainedTokens, old: Tensor) -> TokenLoss:
    """-logprobs: the negative log-likelihood, in nats. Neither `old` nor the advantages enter."""
    return TokenLoss(-tokens.logprobs)
