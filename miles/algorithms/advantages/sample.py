"""What an advantage function sees of a sample, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Advantage = float | Sequence[float]
"""One number for all trained tokens of a sample, or one for each of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample that takes part: it has a finite reward and at least one trained token."""

    reward: float
    tokens: int = 1
    """Trained tokens."""
    penalties: tuple[float, ...] = ()
    """What each trained token costs: the KL to the reference where it is part of the reward. Empty: nothing."""

    @property
    def total(self) -> float:
        """The reward less all penalties."""
        return self.reward - math.fsum(self.penalties)

    def returns(self, baseline: float = 0.0) -> list[float]:
        """What each trained token leads to: the reward less `baseline`, less the penalties from that token on.

        The reward comes at the last token, and nothing is discounted.
        """
        gain = self.reward - baseline
        if not self.penalties:
            return [gain] * self.tokens
        costs = list(accumulate(reversed(self.penalties)))
        return [gain - cost for cost in reversed(costs)]
