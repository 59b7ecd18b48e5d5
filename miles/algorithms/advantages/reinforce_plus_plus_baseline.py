"""REINFORCE++ with a baseline: the mean of the group is subtracted before the batch is normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles.algorithms.advantages.reinforce_plus_plus import normalised
from miles.algorithms.advantages.sample import Sample
from miles.algorithms.option_types import Margin


def reinforce_plus_plus_baseline(groups: Sequence[Sequence[Sample]], *, eps: Margin = 1e-8) -> list[list[list[float]]]:
    """(A - mean) / (std + eps) over all trained tokens of the batch, A = R - mean of R over the group.

    With `kl.place: reward`, the token's penalties from here on are subtracted from A; the paper has its KL in the loss
    (`kl.estimator: k2`). Source: arXiv 2501.03262.
    """
    returns = []
    for group in groups:
        baseline = math.fsum(sample.reward for sample in group) / max(1, len(group))
        returns.append([sample.returns(baseline) for sample in group])
    return normalised(returns, eps)
