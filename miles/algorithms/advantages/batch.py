"""Who takes part in a batch's advantages: samples with a finite reward and a trained token, and nobody else.

The others do not enter any baseline and get no loss, whichever advantage is asked for. Called by `miles.trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from miles.algorithms.advantages.sample import Advantage, Sample

AdvantageFunction = Callable[[Sequence[Sequence[Sample]]], Sequence[Sequence[Advantage]]]


def takes_part(reward: float | None, tokens: int) -> bool:
    """Whether a sample has a finite reward (else the verifier abstained) and at least one trained token."""
    return reward is not None and math.isfinite(reward) and tokens > 0


def batch_advantages(
    groups: Sequence[Sequence[Sample | None]], function: AdvantageFunction
) -> list[list[list[float] | None]]:
    """The advantage of each trained token of each sample of each group; None for None, who takes no part.

    All are NaN where a penalty is (a reference model that broke): the step is then a bad one, and not one of zeros.

    Raises ValueError when `function` answers for another number of samples or tokens, or with what is not finite.
    """
    present = [[sample for sample in group if sample is not None] for group in groups]
    if not all(math.isfinite(sample.total) for group in present for sample in group):
        return [[None if one is None else [math.nan] * one.tokens for one in group] for group in groups]
    answers = function(present)
    if [len(group) for group in answers] != [len(group) for group in present]:
        raise ValueError(
            f"the advantage function was given groups of {[len(group) for group in present]} samples and answered "
            f"for {[len(group) for group in answers]}"
        )
    result: list[list[list[float] | None]] = []
    for group, answered in zip(groups, answers, strict=True):
        left = iter(answered)
        result.append([None if sample is None else _by_token(sample, next(left)) for sample in group])
    return result


def _by_token(sample: Sample, answer: Advantage) -> list[float]:
    values = [float(value) for value in answer] if isinstance(answer, Sequence) else [float(answer)] * sample.tokens
    if len(values) != sample.tokens or not all(math.isfinite(value) for value in values):
        raise ValueError(f"the advantage function answered {answer!r} for a sample of {sample.tokens} trained tokens")
    return values
