"""Means of losses: the weights of sequences give the mean that was asked for, however the batch is cut."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from miles.algorithms import registry
from tests.miles.algorithms import references

LONGEST = 64
BATCHES = {
    "random": [[3, 1, 5], [2, 2], [7]],
    "one": [[1]],
    "equal": [[4, 4], [4, 4]],
    "masked": [[0, 3], [0, 0], [2, 0]],
    "empty group": [[], [3]],
    "very long": [[60000, 1], [2, 30000]],
}


def weights_of(name: str, counts: list[list[int]]) -> list[list[float]]:
    weights: list[list[float]] = registry.load("aggregation", name)(counts, max_tokens=LONGEST)
    return weights


@pytest.mark.parametrize("name", registry.AGGREGATIONS)
@pytest.mark.parametrize("counts", BATCHES.values(), ids=BATCHES)
def test_weighted_sums_are_the_mean_that_was_asked_for(name: str, counts: list[list[int]]) -> None:
    dice = random.Random(3)
    losses = [[[dice.gauss(0, 1) for _ in range(count)] for count in group] for group in counts]
    weights = weights_of(name, counts)
    total = sum(
        weight * sum(sample)
        for group, ws in zip(losses, weights, strict=True)
        for sample, weight in zip(group, ws, strict=True)
    )
    assert total == pytest.approx(references.aggregate(name, losses, LONGEST), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", registry.AGGREGATIONS)
def test_nothing_to_train_is_no_error(name: str) -> None:
    assert [len(group) for group in weights_of(name, [[0, 0], []])] == [2, 0]


@pytest.mark.parametrize("name", registry.AGGREGATIONS)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    """O06, on tensors: any cut into micro-batches and any spread over ranks adds up to the gradient of the whole.

    Fails when weights are made from a micro-batch's own counts (the control below).
    """
    counts = [[3, 1, 5], [2, 8], [4]]
    lengths = [count for group in counts for count in group]
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in lengths]
    weights = list(itertools.chain(*weights_of(name, counts)))

    def gradient(parts: list[list[int]], weigh: object = None) -> torch.Tensor:
        parameter = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
        for part in parts:
            own = weights if weigh is None else _own_weights(name, [lengths[i] for i in part], len(parts))
            losses = [
                (weight * (features[i] @ parameter).sin()).sum()
                for i, weight in zip(part, (weights[i] for i in part) if weigh is None else own, strict=True)
            ]
            torch.autograd.backward(torch.stack(losses).sum())
        assert parameter.grad is not None
        return parameter.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    cuts = [[[0], [1], [2], [3], [4], [5]], [[5, 0], [1, 2, 3], [4]], [[4, 2, 0], [1, 3, 5]]]
    for cut in cuts:
        torch.testing.assert_close(gradient(cut), whole, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(gradient(cuts[1], "each its own"), whole, rtol=1e-3)


def _own_weights(name: str, lengths: list[int], parts: int) -> list[float]:
    """What a mean of micro-batch means would weigh: the mistake."""
    return [weight / parts for weight in weights_of(name, [lengths])[0]]
