"""Every correction equals its reference; the policy that ratios are measured from; the staleness of single tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.algorithms import registry
from miles.algorithms.proximal import interpolated, recomputed
from miles.algorithms.tokens import TrainedTokens
from tests.miles.algorithms import references
from tests.miles.algorithms.cases import CASES, array

SETTINGS: list[tuple[str, dict[str, object], dict[str, float | str | None]]] = [
    ("tis", {}, {"cap": 2.0, "level": "token"}),
    ("tis", {"cap": 1.1, "level": "sequence"}, {"cap": 1.1, "level": "sequence"}),
    ("mis", {}, {"low": 0.0, "high": 2.0, "level": "sequence"}),
    (
        "mis",
        {"low": 0.8, "high": 1.3, "level": "token"},
        {"low": 0.8, "high": 1.3, "level": "token"},
    ),
    ("icepop", {}, {"low": 0.5, "high": 5.0}),
    ("icepop", {"low": 0.9, "high": 1.1}, {"low": 0.9, "high": 1.1}),
    ("decoupled", {}, {"cap": None}),
    ("decoupled", {"cap": 1.5}, {"cap": 1.5}),
]


@pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("name", "options", "explicit"), SETTINGS, ids=lambda value: str(value))
def test_a_correction_is_the_papers(
    tokens: TrainedTokens, name: str, options: dict[str, object], explicit: dict[str, float | str | None]
) -> None:
    proximal = tokens.logprobs.detach()
    found = registry.load("correction", name, options)(proximal - tokens.behaviour, tokens)
    expected = references.correction(
        name, array(proximal), array(tokens.behaviour), tokens.sequence.tolist(), **explicit
    )
    np.testing.assert_allclose(array(found), expected, rtol=1e-9)


def test_masks_are_two_sided() -> None:
    log_ratio = torch.tensor([0.0, -1.0, 1.0, 2.0]).log1p().nan_to_num(neginf=-9.0)
    tokens = replace(CASES["one-token"], sequence=torch.zeros(4, dtype=torch.int64), sequences=1)
    found = registry.load("correction", "icepop", {"low": 0.5, "high": 2.5})(log_ratio, tokens)
    assert found.tolist() == pytest.approx([1.0, 0.0, 2.0, 0.0])


def test_the_recomputed_policy_is_the_trainers_before_the_step() -> None:
    tokens = CASES["random"]
    current = recomputed(tokens)
    assert torch.equal(current, tokens.logprobs.detach()) and not current.requires_grad


@pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)
def test_the_interpolated_policy_comes_nearer_to_the_engines_the_fresher_the_token(tokens: TrainedTokens) -> None:
    """A-3PO by the formula, token by token. Fails when a token takes the staleness of its sequence."""
    expected = []
    for new, old, age in zip(
        array(tokens.logprobs), array(tokens.behaviour), array(tokens.staleness).astype(int), strict=True
    ):
        alpha = 0.0 if age == 0 else 1.0 / age
        expected.append(alpha * old + (1.0 - alpha) * new)
    found = interpolated(tokens)
    assert not found.requires_grad
    np.testing.assert_allclose(array(found), np.array(expected), rtol=1e-12)


def test_interpolation_needs_the_age_of_tokens() -> None:
    with pytest.raises(ValueError, match="staleness"):
        interpolated(replace(CASES["random"], staleness=None))


def test_a_token_that_the_engine_held_impossible_leaves_the_interpolated_policy_finite() -> None:
    """Fails without the bound: 0 x -inf is NaN for a fresh token, and one NaN would skip the whole step."""
    tokens = CASES["random"]
    impossible = torch.full_like(tokens.behaviour, -torch.inf)
    for staleness in (0, 1, 3):
        ages = torch.full_like(tokens.sequence, staleness)
        assert interpolated(replace(tokens, behaviour=impossible, staleness=ages)).isfinite().all()
