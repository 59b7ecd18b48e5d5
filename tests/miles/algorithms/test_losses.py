"""Every loss equals the reference written from its paper, in value and in gradient, on random and on edge inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.algorithms.losses.cispo import cispo
from miles.algorithms.losses.clipped import clipped
from miles.algorithms.losses.gspo import gspo
from miles.algorithms.losses.reinforce import reinforce
from miles.algorithms.losses.supervised import supervised
from miles.algorithms.tokens import TrainedTokens
from tests.miles.algorithms import references
from tests.miles.algorithms.cases import CASES, array, fresh, gradient, micro_batch

BOUNDS = [(0.2, 0.28), (0.0, 0.0), (1.0, 4.0)]


def cases() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)


@cases()
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_clipped_is_ppos(tokens: TrainedTokens, bounds: tuple[float, float], dual: float | None) -> None:
    tokens = fresh(tokens)
    old, advantages = array(tokens.behaviour), array(tokens.advantages)
    result = clipped(tokens, tokens.behaviour, clip=bounds, dual_clip=dual)

    def paper(logprobs: references.Array) -> references.Array:
        return references.ppo_loss(logprobs, old, advantages, *bounds, dual)

    at = array(tokens.logprobs)
    np.testing.assert_allclose(array(result.values), paper(at), rtol=1e-10, atol=1e-12)
    at_a_kink = np.isclose(at, old) if bounds == (0.0, 0.0) else np.zeros(len(at), dtype=bool)
    expected = [(paper(at + 1e-6)[t] - paper(at - 1e-6)[t]) / 2e-6 for t in range(len(at))] if len(at) < 100 else None
    if expected is not None:
        found = gradient(result.values, tokens.logprobs)
        np.testing.assert_allclose(found[~at_a_kink], np.array(expected)[~at_a_kink], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves", "low", "high"),
    [
        (1.0, 2.0, -2.0, True, 0, 0),
        (1.5, 2.0, -2.56, False, 0, 1),
        (0.5, 2.0, -1.0, True, 0, 0),
        (0.5, -2.0, 1.6, False, 1, 0),
        (1.5, -2.0, 3.0, True, 0, 0),
        (1.25, 1.0, -1.25, True, 0, 0),
        (0.79, -1.0, 0.8, False, 1, 0),
    ],
)
def test_clipping_is_asymmetric_and_pessimistic(
    ratio: float, advantage: float, loss: float, moves: bool, low: int, high: int
) -> None:
    logprobs = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = TrainedTokens(logprobs, torch.tensor([-2.0]), torch.tensor([advantage]), zero, 1)
    result = clipped(tokens, tokens.behaviour, clip=(0.2, 0.28))
    assert result.values.item() == pytest.approx(loss, rel=1e-5)
    assert (result.metrics["clip_low"].item(), result.metrics["clip_high"].item()) == (low, high)
    assert (gradient(result.values, logprobs)[0] != 0) is np.bool_(moves)


def test_dual_clip_bounds_what_a_bad_sample_does() -> None:
    """Fails when the floor is left out: an absurd ratio then outweighs the whole batch."""
    tokens = fresh(CASES["huge-ratios"])
    old = tokens.logprobs.detach() - 10.0
    bounded = clipped(tokens, old, dual_clip=3.0)
    bad = array(tokens.advantages) < 0
    assert bad.any()
    np.testing.assert_allclose(array(bounded.values)[bad], -3.0 * array(tokens.advantages)[bad])
    assert np.all(gradient(bounded.values, tokens.logprobs)[bad] == 0)
    assert array(clipped(tokens, old).values).max() > 1000


@cases()
@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.2, 0.28), (1.0, 4.0)])
def test_gspo_by_token_is_the_papers_objective_of_sequences(tokens: TrainedTokens, bounds: tuple[float, float]) -> None:
    """Value and gradient. Fails when the ratio is a token's own, or is not normalised by length."""
    tokens = fresh(tokens)
    old, advantages, owner = array(tokens.behaviour), array(tokens.advantages), tokens.sequence.tolist()

    def paper(logprobs: references.Array) -> float:
        return references.gspo_loss_of_sequences(logprobs, old, advantages, owner, *bounds)

    result = gspo(tokens, tokens.behaviour, clip=bounds)
    weights = torch.tensor([1.0 / (owner.count(s) * len(set(owner))) for s in owner], dtype=torch.float64)
    at = array(tokens.logprobs)
    loss = (weights * result.values).sum()
    assert loss.item() == pytest.approx(paper(at), rel=1e-10, abs=1e-12)
    if len(at) < 100:
        expected = references.numeric_gradient(paper, at)
        np.testing.assert_allclose(gradient(weights * result.values, tokens.logprobs), expected, rtol=1e-5, atol=1e-7)


def test_gspo_with_an_advantage_of_each_token_moves_each_by_its_own() -> None:
    """GSPO-token: d loss / d logprob is -s A_t where it is not clipped. Fails when the mean keeps its gradient."""
    tokens = fresh(CASES["random"])
    advantages = torch.linspace(-1.0, 1.0, len(tokens.logprobs), dtype=torch.float64)
    result = gspo(replace(tokens, advantages=advantages), tokens.behaviour, clip=(0.1, 0.1))
    difference, owner = array(tokens.logprobs) - array(tokens.behaviour), array(tokens.sequence)
    expected = []
    for t, advantage in enumerate(advantages.tolist()):
        score = math.exp(difference[owner == owner[t]].mean())
        stopped = (score > 1.1 and advantage > 0) or (score < 0.9 and advantage < 0)
        expected.append(0.0 if stopped else -score * advantage)
    assert 0 < expected.count(0.0) < len(expected)
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), np.array(expected), rtol=1e-10)


@cases()
@pytest.mark.parametrize("bounds", [(1.0, 4.0), (0.2, 0.28)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(tokens: TrainedTokens, bounds: tuple[float, float]) -> None:
    """Fails when the ratio keeps its own gradient."""
    tokens = fresh(tokens)
    result = cispo(tokens, tokens.behaviour, clip=bounds)
    at, old, advantages = array(tokens.logprobs), array(tokens.behaviour), array(tokens.advantages)
    slope = references.cispo_gradient(at, old, advantages, *bounds)
    np.testing.assert_allclose(array(result.values), slope * at, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), slope, rtol=1e-10, atol=1e-12)


@cases()
def test_reinforce_is_the_policy_gradient(tokens: TrainedTokens) -> None:
    tokens = fresh(tokens)
    result = reinforce(tokens, tokens.behaviour)
    np.testing.assert_allclose(array(result.values), -array(tokens.advantages) * array(tokens.logprobs))
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), -array(tokens.advantages))


@cases()
def test_supervised_is_the_negative_log_likelihood(tokens: TrainedTokens) -> None:
    tokens = fresh(tokens)
    result = supervised(tokens, tokens.behaviour)
    np.testing.assert_allclose(array(result.values), -array(tokens.logprobs))
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), np.full(len(tokens.logprobs), -1.0))


@pytest.mark.parametrize("loss", [clipped, gspo, cispo, reinforce, supervised])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absurd_ratios_stay_finite(loss: object, dtype: torch.dtype) -> None:
    """Fails without MAX_LOG_RATIO."""
    assert callable(loss)
    behaviour = torch.tensor([-1e4, -1.0, -1e4], dtype=dtype)
    logprobs = torch.tensor([-1.0, -1e4, -2.0], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, 0.0], dtype=dtype)
    tokens = TrainedTokens(logprobs, behaviour, advantages, torch.tensor([0, 1, 2]), 3)
    result = loss(tokens, behaviour)
    assert torch.isfinite(result.values).all()
    assert np.isfinite(gradient(result.values.float(), logprobs)).all()


@pytest.mark.parametrize("loss", [clipped, gspo, cispo, reinforce, supervised])
def test_a_loss_does_not_see_how_the_batch_is_cut(loss: object) -> None:
    """Every sequence alone gives what it gives next to others. Fails when a loss mixes sequences."""
    assert callable(loss)
    whole = micro_batch([4, 1, 6], 11)
    together = array(loss(whole, whole.behaviour).values)
    for index in range(3):
        own = whole.sequence == index
        alone = TrainedTokens(
            whole.logprobs[own], whole.behaviour[own], whole.advantages[own], torch.zeros_like(whole.sequence[own]), 1
        )
        np.testing.assert_allclose(array(loss(alone, alone.behaviour).values), together[own.numpy()], rtol=1e-12)
