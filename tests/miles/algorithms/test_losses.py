"""The clipped loss by hand, and the registry."""

import math

import pytest
import torch

from controllers.errors import ConfigError
from miles.algorithms import registry
from miles.algorithms.losses import clipped, supervised


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves", "cut"),
    [
        (1.0, 2.0, -2.0, True, 0.0),
        (1.5, 2.0, -2.56, False, 1.0),
        (0.5, 2.0, -1.0, True, 0.0),
        (0.5, -2.0, 1.6, False, 1.0),
        (1.5, -2.0, 3.0, True, 0.0),
        (1.25, 1.0, -1.25, True, 0.0),
        (0.79, -1.0, 0.8, False, 1.0),
    ],
)
def test_clipping_is_asymmetric_and_pessimistic(
    ratio: float, advantage: float, loss: float, moves: bool, cut: float
) -> None:
    logprobs = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    result = clipped(logprobs, torch.tensor([-2.0]), torch.tensor([advantage]), clip=(0.2, 0.28))
    assert result.values.item() == pytest.approx(loss, rel=1e-5)
    assert result.metrics["clip_fraction"].item() == cut
    assert result.metrics["ratio_mean"].item() == pytest.approx(ratio, rel=1e-5)
    torch.autograd.backward(result.values.sum())
    assert logprobs.grad is not None
    assert (logprobs.grad.item() != 0) is moves


def test_an_absurd_ratio_stays_finite() -> None:
    result = clipped(torch.tensor([-1.0]), torch.tensor([-1000.0]), torch.tensor([-1.0]), clip=(0.2, 0.28))
    assert math.isfinite(result.values.item())


def test_supervised_loss_is_the_negative_logprob() -> None:
    assert supervised(torch.tensor([-1.0, -3.0])).values.tolist() == [1.0, 3.0]


def test_names_and_paths_resolve() -> None:
    assert registry.load("advantage", "grpo")([1.0, 1.0]) == [0.0, 0.0]
    assert registry.load("loss", "clipped") is clipped
    assert registry.load("advantage", "statistics:multimode") is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpro", "did you mean 'grpo'"),
        ("math:", "not of the form package.module:function"),
        ("no_such_module_x:f", "cannot import 'no_such_module_x'"),
        ("math:no_such_function", "has no 'no_such_function'"),
        ("math:pi", "is not a function"),
    ],
)
def test_unknown_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.load("advantage", name)
