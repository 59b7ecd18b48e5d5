"""The model a KL penalty is measured from: which moment's it is, and that using it leaves no trace."""

from pathlib import Path

import pytest
import torch

from executors.trajectory import Batch
from miles.algorithms.options import AlgorithmOptions, KlOptions
from miles.trainer.protocol import Example
from miles.trainer.reference_model import ReferenceModel
from tests.miles.trainer.plain_loop import response_logprobs
from tests.miles.trainer.tiny import hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")

WITH_KL = AlgorithmOptions(kl=KlOptions(0.1))
IN_REWARD = AlgorithmOptions(advantage="reinforce_plus_plus", kl=KlOptions(0.1, "k1", "reward"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def mean_k3(model: object, against: object, batch: Batch) -> float:
    """exp(-x) - 1 + x with x = log(policy / reference), mean over the tokens of a batch."""
    members = [member for group in batch.groups for member in group.trajectories]
    x = torch.cat([response_logprobs(model, one) - response_logprobs(against, one) for one in members]).detach()
    return float(((-x).exp() - 1 + x).mean())


def test_kl_is_measured_from_the_weights_before_the_first_step(model: Path, tmp_path: Path) -> None:
    trained = learner(model, lr=1e-2, lr_warmup_steps=1, algorithm=WITH_KL)
    assert trained.step(random_batch(1)).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    trained.step(random_batch(2))
    trained.export(tmp_path / "now")
    wanted = mean_k3(reference(tmp_path / "now"), reference(model), random_batch(3))
    assert wanted > 1e-3
    assert trained.step(random_batch(3)).metrics["kl"] == pytest.approx(wanted, rel=1e-3)


def test_after_a_warm_up_it_is_the_model_that_came_out_of_it(model: Path, tmp_path: Path) -> None:
    """Fails when a reference that a checkpoint within the warm-up needed is kept: without the reset in warmup_step."""
    trained = learner(model, algorithm=WITH_KL)
    for index in range(3):
        trained.warmup_step([Example((1, 2), (3, 4))], 1e-2)
        trained.save(tmp_path / str(index))
    trained.warmup_step([Example((1, 2), (3, 4))], 1e-2)
    assert trained.step(random_batch(1)).metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_it_comes_back_from_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """Fails when a resumed run measures from the weights it resumed with, or from those of the model folder."""
    trained = learner(model, lr=1e-2, lr_warmup_steps=1, algorithm=WITH_KL)
    trained.warmup_step([Example((1, 2), (3, 4))], 1e-2)
    trained.step(random_batch(1))
    trained.save(tmp_path / "checkpoint")
    resumed = learner(model, lr=1e-2, lr_warmup_steps=1, algorithm=WITH_KL)
    resumed.load(tmp_path / "checkpoint")
    expected = trained.step(random_batch(2)).metrics["kl"]
    assert expected > 1e-4
    assert resumed.step(random_batch(2)).metrics["kl"] == expected


def test_a_kl_in_the_reward_needs_it_too(model: Path) -> None:
    trained = learner(model, lr=1e-2, lr_warmup_steps=1, algorithm=IN_REWARD)
    members = [member for group in random_batch(1).groups for member in group.trajectories]
    metrics = trained.step(random_batch(1)).metrics
    plain = reference(model)
    wanted = torch.cat([torch.tensor(one.logprobs) - response_logprobs(plain, one).detach() for one in members]).mean()
    assert metrics["kl"] == pytest.approx(float(wanted), rel=1e-4)
    assert metrics["reference_s"] > 0


def test_the_live_weights_come_back_whatever_happens(model: Path) -> None:
    """Fails without the `finally` in ReferenceModel.in_place."""
    trained = learner(model)
    kept = ReferenceModel(trained.model)
    first = hf_tensors(trained)
    trained.step(random_batch(1))
    live = hf_tensors(trained)

    def use_and_fail() -> None:
        with kept.in_place(trained.model):
            assert all(torch.equal(a, b) for a, b in zip(first.values(), hf_tensors(trained).values(), strict=True))
            raise RuntimeError("in the middle")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"):
            use_and_fail()
        assert all(torch.equal(a, b) for a, b in zip(live.values(), hf_tensors(trained).values(), strict=True))
