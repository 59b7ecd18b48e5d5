"""Micro-batches of trained tokens, random and on the edge, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from miles.algorithms.tokens import TrainedTokens
from tests.miles.algorithms.references import Array


def micro_batch(lengths: Sequence[int], seed: int = 0, *, spread: float = 0.3, same: bool = False) -> TrainedTokens:
    """Sequences of `lengths` trained tokens (0 for one whose tokens are all masked), each with one advantage.

    `spread` is the standard deviation of log-ratios; with `same` all policies and advantages are equal.
    """
    dice = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    behaviour = dice.normal(-2.0, 1.0, len(owner))

    def near() -> torch.Tensor:
        return torch.from_numpy(behaviour + (0.0 if same else dice.normal(0.0, spread, len(owner))))

    advantages = np.full(len(lengths), 0.7) if same else dice.normal(0.0, 1.5, len(lengths))
    return TrainedTokens(
        logprobs=near().requires_grad_(),
        behaviour=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(advantages[owner]),
        sequence=torch.from_numpy(owner),
        sequences=len(lengths),
        reference=near(),
        entropy=torch.from_numpy(dice.uniform(0.0, 3.0, len(owner))).requires_grad_(),
        staleness=torch.from_numpy(dice.integers(0, 4, len(owner))),
    )


CASES = {
    "random": micro_batch([3, 1, 5, 8], 1),
    "far-off-policy": micro_batch([4, 4, 7], 2, spread=2.0),
    "one-token": micro_batch([1], 3),
    "all-equal": micro_batch([3, 4], 4, same=True),
    "huge-ratios": micro_batch([6, 5], 5, spread=60.0),
    "empty-masks": micro_batch([0, 3, 0, 0, 2, 0], 6),
    "nothing": micro_batch([0, 0], 7),
    "very-long": micro_batch([500, 2], 8),
}


def fresh(tokens: TrainedTokens) -> TrainedTokens:
    """A copy whose gradients are its own."""
    assert tokens.entropy is not None
    return replace(
        tokens,
        logprobs=tokens.logprobs.detach().clone().requires_grad_(),
        entropy=tokens.entropy.detach().clone().requires_grad_(),
    )


def array(values: torch.Tensor | None) -> Array:
    """As numpy, in float64."""
    assert values is not None
    return np.asarray(values.detach().double().numpy(), dtype=np.float64)


def gradient(values: torch.Tensor, at: torch.Tensor) -> Array:
    """Of the sum of `values`; 0 where `values` do not depend on `at`."""
    (found,) = torch.autograd.grad(values.sum(), at, allow_unused=True, retain_graph=True)
    return np.zeros(len(at)) if found is None else array(found)
