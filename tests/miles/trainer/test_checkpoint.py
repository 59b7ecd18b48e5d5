"""A checkpoint restores everything the next step depends on, in place, and is whole or absent."""

import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from controllers.errors import ConfigError
from miles.trainer import checkpoint
from miles.trainer.protocol import Example
from tests.miles.trainer.tiny import hf_tensors, learner, random_batch, write_model

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_takes_the_same_next_step(model: Path, tmp_path: Path) -> None:
    """O29: rate, moments and weights of step 4 are bit-equal to those of the run that went on."""
    going_on = learner(model, lr_warmup_steps=8)
    going_on.warmup_step([Example((1,), (2, 3))], 1e-3)
    for step in (1, 2, 3):
        going_on.step(random_batch(step))
    going_on.save(tmp_path / "checkpoint")
    wanted = going_on.step(random_batch(4)).metrics

    resumed = learner(model, lr_warmup_steps=8)
    views = list(resumed.shards())
    resumed.load(tmp_path / "checkpoint")
    assert resumed.counters.steps == 3 and resumed.counters.warmup_steps == 1
    got = resumed.step(random_batch(4)).metrics
    assert got["lr"] == wanted["lr"] and got["loss"] == wanted["loss"] and got["grad_norm"] == wanted["grad_norm"]
    assert same(hf_tensors(going_on), hf_tensors(resumed))
    exported = hf_tensors(resumed)
    assert all(
        torch.equal(shard.tensor, exported[shard.name][tuple(slice(s, s + n) for s, n in shard.box)]) for shard in views
    ), "views made before the load must stay live"


def test_a_checkpoint_from_before_the_first_step_can_be_loaded(model: Path, tmp_path: Path) -> None:
    """Fails without the moments that PortableFP32Optimizer makes at its start."""
    first = learner(model)
    first.save(tmp_path / "checkpoint")
    first.step(random_batch(1))
    later = learner(model)
    later.step(random_batch(1, seed=5))
    later.load(tmp_path / "checkpoint")
    later.step(random_batch(1))
    assert same(hf_tensors(first), hf_tensors(later))


def test_the_random_state_comes_back(model: Path, tmp_path: Path) -> None:
    trained = learner(model)
    trained.save(tmp_path / "checkpoint")
    drawn = (torch.rand(1).item(), random.random())
    trained.load(tmp_path / "checkpoint")
    assert (torch.rand(1).item(), random.random()) == drawn


def test_a_save_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Fails when checkpoint.save writes straight into the folder."""
    trained = learner(model)
    full = mock.patch.object(checkpoint, "publish", side_effect=OSError("disk full"))
    with full, pytest.raises(OSError, match="disk full"):
        trained.save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces_a_checkpoint_and_nothing_else(model: Path, tmp_path: Path) -> None:
    trained = learner(model)
    trained.save(tmp_path / "checkpoint")
    trained.step(random_batch(1))
    trained.save(tmp_path / "checkpoint")
    other = learner(model)
    other.load(tmp_path / "checkpoint")
    assert other.counters.steps == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        trained.save(tmp_path / "mine")


def test_saving_starts_no_process(model: Path, tmp_path: Path) -> None:
    """Fails without _write_in_process: upstream leaves a manager process that outlives a killed rank."""
    import psutil

    trained = learner(model)
    trained.save(tmp_path / "checkpoint")
    assert psutil.Process().children(recursive=True) == []


def test_a_folder_without_a_checkpoint_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        learner(model).load(tmp_path)
