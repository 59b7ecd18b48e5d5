"""A checkpoint of one rank: everything the next step depends on, of one moment, in place, whole or absent."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

from controllers.errors import CheckpointFailed, ConfigError
from miles.algorithms.options import AlgorithmOptions, KlOptions
from miles.trainer import checkpoint, checkpoint_writer
from miles.trainer.learner import Learner
from miles.trainer.protocol import Example
from miles.trainer.schedule import learning_rate
from tests.miles.trainer.tiny import hf_tensors, learner, random_batch, write_model

pytestmark = pytest.mark.usefixtures("megatron")

TO_A_REFERENCE = AlgorithmOptions(kl=KlOptions(coefficient=0.1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and len(a) > 0 and all(torch.equal(a[name], b[name]) for name in a)


def state(trained: Learner) -> dict[str, torch.Tensor]:
    """Copies of weights, moments and steps."""
    result = hf_tensors(trained)
    optimizer: Any = trained.optimizer
    for name, parameter in trained.model.named_parameters():
        for kind, value in optimizer.optimizer.state[parameter].items():
            result[f"{kind} of {name}"] = value.clone()
    return result


@contextmanager
def held_writing() -> Iterator[threading.Event]:
    """What is begun inside is written once the event is set."""
    gate, write = threading.Event(), checkpoint_writer._Plan.write

    def wait_and_write(plan: checkpoint_writer._Plan) -> Any:
        assert gate.wait(20)
        return write(plan)

    with mock.patch.object(checkpoint_writer._Plan, "write", wait_and_write):
        yield gate


def test_a_resumed_run_takes_the_same_steps(model: Path, tmp_path: Path) -> None:
    """O29: rate, loss, moments and weights of every later step are bit-equal to those of the run that went on."""
    going_on = learner(model, lr_warmup_steps=4, lr_decay_steps=7)
    going_on.warmup_step([Example((1,), (2, 3))], 1e-3)
    for step in (1, 2, 3):
        going_on.step(random_batch(step))
    going_on.save(tmp_path / "checkpoint")

    resumed = learner(model, lr_warmup_steps=4, lr_decay_steps=7)
    views = list(resumed.shards())
    resumed.load(tmp_path / "checkpoint")
    assert resumed.counters == going_on.counters and resumed.counters.warmup_steps == 1
    for step in (4, 5, 6):
        wanted, got = (one.step(random_batch(step)).metrics for one in (going_on, resumed))
        assert got["lr"] == wanted["lr"] == learning_rate(resumed.options, step)
        assert got["loss"] == wanted["loss"] and got["grad_norm"] == wanted["grad_norm"]
        assert same(state(going_on), state(resumed))
    exported = hf_tensors(resumed)
    assert all(
        torch.equal(shard.tensor, exported[shard.name][tuple(slice(s, s + n) for s, n in shard.box)]) for shard in views
    ), "views made before the load must stay live"


def test_a_resume_advances_the_schedule_once(model: Path, tmp_path: Path) -> None:
    """Also through two checkpoints in a row, and past a step that was skipped."""
    trained = learner(model, lr_warmup_steps=10)
    trained.step(random_batch(1))
    trained.step(random_batch(2, groups=0))
    assert trained.counters.skipped_steps == 1
    for name in ("one", "two"):
        trained.save(tmp_path / name)
        trained = learner(model, lr_warmup_steps=10)
        trained.load(tmp_path / name)
    assert trained.step(random_batch(3)).metrics["lr"] == pytest.approx(3e-4 * 3 / 10, rel=1e-12)


def test_weights_alone_begin_a_schedule_anew(model: Path, tmp_path: Path) -> None:
    """Fails when the counters come with the weights: the new run's rate would start in the middle of its schedule."""
    trained = learner(model, lr_warmup_steps=10)
    for step in (1, 2, 3):
        trained.step(random_batch(step))
    trained.save(tmp_path / "checkpoint")
    fresh = learner(model, lr_warmup_steps=10)
    checkpoint.load_weights(tmp_path / "checkpoint", fresh.model)
    assert same(hf_tensors(trained), hf_tensors(fresh)) and not same(state(trained), state(fresh))
    assert fresh.step(random_batch(1)).metrics["lr"] == pytest.approx(3e-4 / 10, rel=1e-12)


def test_a_checkpoint_from_before_the_first_step_can_be_loaded(model: Path, tmp_path: Path) -> None:
    """Fails without the moments that PortableFP32Optimizer makes at its start."""
    first = learner(model)
    first.save(tmp_path / "checkpoint")
    first.step(random_batch(1))
    later = learner(model)
    later.step(random_batch(1, seed=5))
    later.load(tmp_path / "checkpoint")
    later.step(random_batch(1))
    assert same(state(first), state(later))


def test_training_goes_on_while_it_is_written(model: Path, tmp_path: Path) -> None:
    """Fails without the copy in _Plan.save: the checkpoint would hold tensors of the steps that came after."""
    trained = learner(model)
    trained.step(random_batch(1))
    of_that_moment = state(trained)
    with held_writing() as gate:
        trained.begin_save(tmp_path / "checkpoint")
        trained.step(random_batch(2))
        trained.step(random_batch(3))
        assert not (tmp_path / "checkpoint").exists()
        gate.set()
        trained.finish_save()
    assert not same(state(trained), of_that_moment)
    loaded = learner(model)
    loaded.load(tmp_path / "checkpoint")
    assert loaded.counters.steps == 1 and same(state(loaded), of_that_moment)


def test_a_save_waits_for_the_one_before(model: Path, tmp_path: Path) -> None:
    """Fails without the wait in `begin`: two copies at a time, and threads that mix up their collectives."""
    trained = learner(model)
    with held_writing() as gate:
        trained.begin_save(tmp_path / "one")
        threading.Timer(0.2, gate.set).start()
        trained.begin_save(tmp_path / "two")
        assert (tmp_path / "one").is_dir()
    trained.finish_save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_the_reference_is_that_of_the_run_and_not_of_the_resume(model: Path, tmp_path: Path) -> None:
    """Fails without the reference's weights in the checkpoint: KL would be measured from where the resume began."""
    going_on = learner(model, algorithm=TO_A_REFERENCE, lr_warmup_steps=1)
    for step in (1, 2):
        going_on.step(random_batch(step))
    going_on.save(tmp_path / "checkpoint")
    resumed = learner(model, algorithm=TO_A_REFERENCE, lr_warmup_steps=1)
    resumed.warmup_step([Example((1,), (2, 3))], 1e-2)
    resumed.load(tmp_path / "checkpoint")
    wanted, got = (one.step(random_batch(3)).metrics for one in (going_on, resumed))
    assert got == {**wanted, **{name: value for name, value in got.items() if name.endswith(("_s", "_per_s"))}}
    assert same(state(going_on), state(resumed))

    without = learner(model)
    without.load(tmp_path / "checkpoint")
    without.save(tmp_path / "without")
    with pytest.raises(ConfigError, match="holds no reference weights"):
        resumed.load(tmp_path / "without")


def test_the_random_state_comes_back(model: Path, tmp_path: Path) -> None:
    trained = learner(model)
    trained.save(tmp_path / "checkpoint")
    drawn = (torch.rand(1).item(), random.random(), np.random.random())
    trained.load(tmp_path / "checkpoint")
    assert (torch.rand(1).item(), random.random(), np.random.random()) == drawn


def test_a_save_that_fails_leaves_nothing_and_the_next_succeeds(model: Path, tmp_path: Path) -> None:
    trained = learner(model)
    full = mock.patch.object(checkpoint_writer, "publish", side_effect=OSError("disk full"))
    with full, pytest.raises(CheckpointFailed, match="rank 0: OSError: disk full"):
        trained.save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
    trained.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_never_written_over(model: Path, tmp_path: Path) -> None:
    """A crash in between would leave neither the old one nor the new one."""
    trained = learner(model)
    trained.save(tmp_path / "checkpoint")
    trained.step(random_batch(1))
    with pytest.raises(ConfigError, match="not empty"):
        trained.save(tmp_path / "checkpoint")
    loaded = learner(model)
    loaded.load(tmp_path / "checkpoint")
    assert loaded.counters.steps == 0


def test_saving_starts_no_process(model: Path, tmp_path: Path) -> None:
    """Megatron's own way forks writers, and leaves a manager process that outlives a killed rank."""
    before = set(psutil.Process().children(recursive=True))
    learner(model).save(tmp_path / "checkpoint")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_is_no_checkpoint_is_named(model: Path, tmp_path: Path) -> None:
    trained = learner(model)
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        trained.load(tmp_path)
    trained.save(tmp_path / "torn")
    (tmp_path / "torn" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointFailed, match=r"torn' cannot be read: .*__0_0\.distcp"):
        trained.load(tmp_path / "torn")
    with mock.patch.object(checkpoint, "FORMAT", "miles.checkpoint.0"):
        trained.save(tmp_path / "old")
    with pytest.raises(ConfigError, match=r"format 'miles\.checkpoint\.0'"):
        trained.load(tmp_path / "old")


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    learner(model).save(tmp_path / "checkpoint")
    other = learner(write_model(tmp_path / "other", "llama"))
    with pytest.raises(CheckpointFailed):
        other.load(tmp_path / "checkpoint")
    assert other.counters == replace(other.counters, steps=0)
