"""MIS: masked importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Bound, Level, Margin
from miles.algorithms.tokens import TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def mis(
    log_ratio: Tensor, tokens: TrainedTokens, *, low: Margin = 0.0, high: Bound = 2.0, level: Level = "sequence"
) -> Tensor:
    """rho where low <= rho <= high, else 0, rho = proximal / behaviour: of the whole sequence, or of the token.

    The paper's has no lower bound. Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch".
    """
    ratio = ratio_of(tokens.sequence_sums(log_ratio) if level == "sequence" else log_ratio)
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)
