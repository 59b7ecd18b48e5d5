"""TIS: truncated importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Bound, Level
from miles.algorithms.tokens import TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def tis(log_ratio: Tensor, tokens: TrainedTokens, *, cap: Bound = 2.0, level: Level = "token") -> Tensor:
    """min(rho, cap), rho = proximal / behaviour: of the token, or (`level: sequence`) of the whole sequence.

    Sources: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (by token); Liu et
    al., "When Speed Kills Stability" (by sequence); Ionides 2008, https://doi.org/10.1198/106186008X320456.
    """
    return ratio_of(tokens.sequence_sums(log_ratio) if level == "sequence" else log_ratio).clamp(max=cap)
