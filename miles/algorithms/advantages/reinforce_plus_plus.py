"""REINFORCE++: returns of tokens, normalised over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from miles.algorithms.advantages.sample import Sample
from miles.algorithms.advantages.spread import mean_and_std
from miles.algorithms.option_types import Margin


def reinforce_plus_plus(groups: Sequence[Sequence[Sample]], *, eps: Margin = 1e-8) -> list[list[list[float]]]:
    """(A - mean) / (std + eps) over all trained tokens of the batch, A = R - the token's penalties from here on.

    With `kl.place: reward`, penalties are the paper's token-level KL. Groups of one sample will do. Tokens that are all
    equal have advantage 0. Source: arXiv 2501.03262.
    """
    return normalised([[sample.returns() for sample in group] for group in groups], eps)


def normalised(returns: list[list[list[float]]], eps: float) -> list[list[list[float]]]:
    """Returns of each token of each sample of each group, less their mean and over their standard deviation."""
    values = [value for group in returns for sample in group for value in sample]
    if not values:
        return returns
    mean, std = mean_and_std(values)
    scale = std + eps
    return [[[(v - mean) / scale if std > 0 else 0.0 for v in sample] for sample in group] for group in returns]
