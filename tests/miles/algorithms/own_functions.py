"""What a person might write and name as `module:function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles.algorithms.advantages.sample import Sample
from miles.algorithms.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def signs(groups: Sequence[Sequence[Sample]], *, scale: float = 1.0) -> list[list[float]]:
    """Half is good enough."""
    return [[scale if sample.reward > 0.5 else -scale for sample in group] for group in groups]


def squared(tokens: TrainedTokens, old: Tensor, *, power: int = 2) -> TokenLoss:
    """Not to be recommended."""
    return TokenLoss(tokens.logprobs**power)


def double(log_ratio: Tensor, tokens: TrainedTokens, **anything: float) -> Tensor:
    """A correction that corrects nothing."""
    return 2.0 + 0.0 * log_ratio


def halved(counts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[float]]:
    """A constant."""
    return [[0.5 for _ in group] for group in counts]
