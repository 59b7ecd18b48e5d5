"""IcePop: tokens whose probability differs too much between engine and trainer are left out, on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Bound, Margin
from miles.algorithms.tokens import TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def icepop(log_ratio: Tensor, tokens: TrainedTokens, *, low: Margin = 0.5, high: Bound = 5.0) -> Tensor:
    """rho where low <= rho <= high, else 0, with rho = proximal / behaviour of the token.

    Source: Ling Team, "Every Step Evolves" (Ring-1T, arXiv 2510.18855).
    """
    ratio = ratio_of(log_ratio)
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)
