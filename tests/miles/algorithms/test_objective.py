"""The whole loss: what is composed of what, its gradient, what is logged, and what it asks of the trainer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles.algorithms.objective import Objective
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions, Proximal
from miles.algorithms.proximal import interpolated, recomputed
from miles.algorithms.registry import CORRECTIONS, KL_ESTIMATORS, LOSSES
from miles.algorithms.tokens import TokenLoss, TrainedTokens
from tests.miles.algorithms import references
from tests.miles.algorithms.cases import CASES, array, fresh, gradient

cases = pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)
MODERATE = [name for name in CASES if name not in ("huge-ratios", "very-long")]


def run(tokens: TrainedTokens, **options: Any) -> tuple[TrainedTokens, TokenLoss]:
    tokens = fresh(tokens)
    return tokens, Objective(AlgorithmOptions(**options))(tokens)


@cases
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_kl_in_the_loss_has_the_estimators_value_and_the_gradient_of_the_reverse_kl(
    tokens: TrainedTokens, estimator: str
) -> None:
    """Fails when k1 or k3 is differentiated as it stands."""
    before, plain = run(tokens)
    tokens, result = run(tokens, kl=KlOptions(0.25, estimator))
    policy, reference = array(tokens.logprobs), array(tokens.reference)
    x = np.clip(policy - reference, -references.LIMIT, references.LIMIT)
    expected = np.array([references.kl_estimate(estimator, d, 0.0) for d in x])
    np.testing.assert_allclose(array(result.metrics["kl"]), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(array(result.values - plain.values), 0.25 * expected, rtol=1e-6, atol=1e-9)
    inside = np.abs(policy - reference) < references.LIMIT
    slope = gradient(result.values, tokens.logprobs) - gradient(plain.values, before.logprobs)
    scale = np.maximum(1.0, np.abs(gradient(plain.values, before.logprobs)))
    np.testing.assert_allclose((slope / scale)[inside], (0.25 * x / scale)[inside], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose((slope / scale)[~inside], 0.0, atol=1e-12)


@pytest.mark.parametrize("name", MODERATE)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_with_the_estimators_own_gradient(name: str, estimator: str) -> None:
    """GRPO's KL."""
    tokens = fresh(CASES[name])
    options = AlgorithmOptions(loss="supervised", kl=KlOptions(0.5, estimator, gradient="estimator"))
    result = Objective(options)(tokens)
    reference = array(tokens.reference)

    def paper(logprobs: references.Array) -> float:
        pairs = zip(logprobs, reference, strict=True)
        return float(sum(-p + 0.5 * references.kl_estimate(estimator, p, q) for p, q in pairs))

    at = array(tokens.logprobs)
    assert result.values.sum().item() == pytest.approx(paper(at), rel=1e-10, abs=1e-12)
    expected = references.numeric_gradient(paper, at)
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), expected, rtol=1e-5, atol=1e-6)


def test_what_gradients_mean_on_average() -> None:
    """Over the policy's own samples: the default is the gradient of KL(policy || reference), for every estimator; k3's
    own is that of KL(reference || policy); k1's own is 0. By summing over the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)

    def mean_gradient(kl: KlOptions) -> torch.Tensor:
        nothing = torch.zeros(5, dtype=torch.float64)
        tokens = TrainedTokens(policy, policy.detach(), nothing, torch.arange(5), 5, reference=reference)
        values = Objective(AlgorithmOptions(loss="reinforce", kl=kl))(tokens).values
        (found,) = torch.autograd.grad((policy.detach().exp() * values).sum(), logits, retain_graph=True)
        return found

    for estimator in KL_ESTIMATORS:
        torch.testing.assert_close(mean_gradient(KlOptions(1.0, estimator)), reverse)
    torch.testing.assert_close(mean_gradient(KlOptions(1.0, "k2", gradient="estimator")), reverse)
    torch.testing.assert_close(mean_gradient(KlOptions(1.0, "k3", gradient="estimator")), forward)
    own_k1 = KlOptions(1.0, "k2", gradient="estimator")
    object.__setattr__(own_k1, "estimator", "k1")  # options refuse it
    torch.testing.assert_close(mean_gradient(own_k1), torch.zeros_like(reverse), atol=1e-12, rtol=0)


@cases
@pytest.mark.parametrize("proximal", [recomputed, interpolated])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_correction_multiplies_a_loss_measured_from_the_proximal_policy(
    tokens: TrainedTokens, loss: str, correction: str, proximal: Callable[[TrainedTokens], Tensor]
) -> None:
    """Decoupled: weight x loss(ratio to proximal). Fails when the ratio stays one to the behaviour policy, or when the
    weight has a gradient."""
    old = proximal(tokens)
    moved, plain = run(dataclasses.replace(tokens, behaviour=old), loss=loss)
    name: Proximal = "recomputed" if proximal is recomputed else "interpolated"
    tokens, result = run(tokens, loss=loss, correction=CorrectionOptions(correction, proximal=name))
    defaults: dict[str, dict[str, Any]] = {
        "tis": {"cap": 2.0},
        "mis": {"low": 0.0, "high": 2.0, "level": "sequence"},
        "icepop": {"low": 0.5, "high": 5.0},
        "decoupled": {"cap": None},
    }
    weights = references.correction(
        correction,
        array(old),
        array(tokens.behaviour),
        tokens.sequence.tolist(),
        **defaults[correction],
    )
    np.testing.assert_allclose(array(result.values), weights * array(plain.values), rtol=1e-9)
    expected = weights * gradient(plain.values, moved.logprobs)
    np.testing.assert_allclose(gradient(result.values, tokens.logprobs), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(array(result.metrics["correction_mean"]), weights, rtol=1e-9)
    np.testing.assert_allclose(array(result.metrics["correction_masked"]), weights == 0)


def test_without_a_correction_the_ratio_is_to_the_policy_that_sampled() -> None:
    tokens, result = run(CASES["random"])
    expected = np.exp(array(tokens.logprobs) - array(tokens.behaviour))
    np.testing.assert_allclose(array(result.metrics["ratio_mean"]), expected)
    np.testing.assert_allclose(array(result.maxima["ratio_max"]).max(), expected.max())


@cases
def test_the_entropy_bonus_lowers_the_loss(tokens: TrainedTokens) -> None:
    _, plain = run(tokens)
    tokens, result = run(tokens, entropy_coefficient=0.01)
    assert tokens.entropy is not None
    np.testing.assert_allclose(array(result.values), array(plain.values) - 0.01 * array(tokens.entropy))
    np.testing.assert_allclose(gradient(result.values, tokens.entropy), np.full(len(tokens.logprobs), -0.01))
    assert torch.equal(result.metrics["entropy"], tokens.entropy)


@cases
@pytest.mark.parametrize("loss", LOSSES)
def test_everything_at_once_is_finite_and_of_the_right_shape(tokens: TrainedTokens, loss: str) -> None:
    tokens, result = run(
        tokens,
        loss=loss,
        kl=KlOptions(0.1),
        entropy_coefficient=0.01,
        correction=CorrectionOptions("decoupled", {"cap": 3.0}, "interpolated"),
    )
    for value in (result.values, *result.metrics.values(), *result.maxima.values()):
        assert value.shape == tokens.logprobs.shape and torch.isfinite(value).all()
    assert not any(value.requires_grad for value in itertools.chain(result.metrics.values(), result.maxima.values()))
    assert np.isfinite(gradient(result.values, tokens.logprobs)).all()


def test_clip_fractions_add_up() -> None:
    tokens, result = run(CASES["far-off-policy"])
    ratio, advantages = np.exp(array(tokens.logprobs - tokens.behaviour)), array(tokens.advantages)
    np.testing.assert_array_equal(array(result.metrics["clip_low"]), (ratio < 0.8) & (advantages < 0))
    np.testing.assert_array_equal(array(result.metrics["clip_high"]), (ratio > 1.28) & (advantages > 0))
    total = array(result.metrics["clip_low"]) + array(result.metrics["clip_high"])
    np.testing.assert_array_equal(array(result.metrics["clip_fraction"]), total)
    assert 0 < total.sum() < len(total)


@pytest.mark.parametrize("coefficient", [0.0, 0.1, -0.1])
def test_it_says_whether_it_needs_an_entropy(coefficient: float) -> None:
    assert Objective(AlgorithmOptions(entropy_coefficient=coefficient)).needs_entropy is (coefficient != 0)


def test_a_kl_in_the_reward_is_not_one_in_the_loss() -> None:
    """Fails when the loss adds a penalty that the advantages have already."""
    _, plain = run(CASES["random"])
    _, result = run(CASES["random"], kl=KlOptions(0.1, place="reward"))
    assert "kl" not in result.metrics and torch.equal(result.values, plain.values)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kl": KlOptions(0.1)}, "reference"),
        ({"entropy_coefficient": 0.1}, "entropy"),
        ({"correction": CorrectionOptions("tis", {}, "interpolated")}, "staleness"),
    ],
)
def test_what_it_needs_and_lacks_is_an_error(options: dict[str, Any], said: str) -> None:
    bare = dataclasses.replace(CASES["random"], reference=None, entropy=None, staleness=None)
    with pytest.raises(ValueError, match=said):
        Objective(AlgorithmOptions(**options))(bare)
