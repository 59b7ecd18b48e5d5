"""Steps that change nothing: said in the metrics, counted, and without a trace in weights or moments."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles.algorithms.options import AlgorithmOptions
from miles.algorithms.tokens import TokenLoss, TrainedTokens
from miles.trainer.learner import Learner
from miles.trainer.optimizer import PortableFP32Optimizer
from tests.miles.trainer.tiny import hf_tensors, learner, random_batch, write_model

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def state(trained: Learner) -> list[Tensor]:
    """Copies of weights, moments and their step."""
    assert isinstance(trained.optimizer, PortableFP32Optimizer)
    moments = [value.clone() for entry in trained.optimizer.optimizer.state.values() for value in entry.values()]
    return [*hf_tensors(trained).values(), *moments]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_gradient_above_the_limit_is_not_taken(model: Path) -> None:
    """Fails without `largest_norm` in PortableFP32Optimizer.apply."""
    usual = learner(model).step(random_batch(1)).metrics["grad_norm"]
    strict = learner(model, skip_grad_norm=usual * 0.99)
    before = state(strict)
    metrics = strict.step(random_batch(1)).metrics
    assert metrics["skipped"] == metrics["skipped_steps"] == 1
    assert metrics["grad_norm"] == pytest.approx(usual) and metrics["loss"] != 0
    assert same(before, state(strict))
    lenient = learner(model, skip_grad_norm=usual * 1.01)
    metrics = lenient.step(random_batch(1)).metrics
    assert metrics["skipped"] == metrics["skipped_steps"] == 0
    assert not same(before, state(lenient))


def endless(tokens: TrainedTokens, old: Tensor) -> TokenLoss:
    """A loss that is infinite and has a finite gradient."""
    return TokenLoss(tokens.logprobs + math.inf)


def test_a_loss_that_is_not_finite_is_not_taken_though_its_gradient_is(model: Path) -> None:
    """Fails when only the gradient norm is looked at."""
    trained = learner(model, algorithm=AlgorithmOptions(loss=f"{__name__}:endless"))
    before = state(trained)
    metrics = trained.step(random_batch(1)).metrics
    assert metrics["skipped"] == 1 and math.isfinite(metrics["grad_norm"]) and metrics["loss"] == math.inf
    assert same(before, state(trained))


def test_a_skipped_step_leaves_nothing_for_the_next(model: Path) -> None:
    """Fails when the gradients of the skipped step stay in the buffers."""
    once, after_skip = learner(model), learner(model)
    handle = after_skip.model.decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * math.nan)
    after_skip.step(random_batch(1))
    handle.remove()
    once.counters = after_skip.counters
    assert once.step(random_batch(2)).metrics["grad_norm"] == after_skip.step(random_batch(2)).metrics["grad_norm"]
    assert same(list(hf_tensors(once).values()), list(hf_tensors(after_skip).values()))
