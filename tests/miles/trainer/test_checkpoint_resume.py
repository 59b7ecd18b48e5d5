"""O29 over processes: new ranks go on from a checkpoint with the very steps that the old ones would have taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ONE_RANK, ParallelSizes
from miles.trainer.protocol import Example
from tests.miles.trainer.tiny import random_batch, write_model
from tests.support.ranks import ranks

pytestmark = pytest.mark.real

TP2, PP2, DP2 = ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(data=2)
LAST = 6
Course = list[dict[str, Any]]


def options(model: Path, sizes: ParallelSizes) -> TrainerOptions:
    return TrainerOptions(model, parallel=sizes, lr=1e-2, lr_warmup_steps=3, lr_decay_steps=LAST)


def train(model: Path, sizes: ParallelSizes, steps: Sequence[int], save: Path | None, load: Path | None) -> Course:
    """Steps of one rank, saved after the third, or from a load on: what each did, and the rank's state after it."""
    from miles.trainer.learner import Learner

    learner = Learner(options(model, sizes))
    if load is None:
        learner.warmup_step([Example((1, 2), (3, 4, 5))], 1e-3)
    else:
        learner.load(load)
    course = []
    for step in steps:
        metrics = learner.step(random_batch(step)).metrics
        drawn = torch.rand(()).item()
        if step == 3 and save is not None:
            learner.begin_save(save)
        optimizer: Any = learner.optimizer
        moments = [optimizer.optimizer.state[one] for one in learner.model.parameters()]
        course.append(
            {
                "lr": metrics["lr"],
                "loss": metrics["loss"],
                "grad_norm": metrics["grad_norm"],
                "weights": [one.detach().clone() for one in learner.model.parameters()],
                "moments": [{name: value.clone() for name, value in one.items()} for one in moments],
                "drawn": drawn,
            }
        )
    learner.finish_save()
    return course


def test_new_ranks_take_the_same_steps(tmp_path: Path) -> None:
    """Rate, loss, gradient norm, weights, both moments, step and random numbers: bit for bit, for each way to cut."""
    model = write_model(tmp_path / "model")
    wanted = {}
    with ranks(2) as old:
        for name, sizes in (("tp", TP2), ("dp", DP2), ("pp", PP2)):
            args = (model, sizes, range(1, LAST + 1), tmp_path / name, None)
            wanted[name] = old.run_as(sizes, train, *args)
    with ranks(2) as new:
        for name, sizes in (("tp", TP2), ("dp", DP2), ("pp", PP2)):
            found = new.run_as(sizes, train, model, sizes, range(4, LAST + 1), None, tmp_path / name)
            for before, after in zip(wanted[name], found, strict=True):
                for step, one, other in zip(range(4, LAST + 1), before[3:], after, strict=True):
                    assert differences(one, other) == [], f"{name}, step {step}"
    with ranks(1) as alone:
        (course,) = alone.run_as(ONE_RANK, train, model, ONE_RANK, range(4, LAST + 1), None, tmp_path / "dp")
        assert [step["lr"] for step in course] == [step["lr"] for step in wanted["dp"][0][3:]]
        for mine, theirs in zip(course, wanted["dp"][0][3:], strict=True):
            # Another order of summation, which Adam amplifies: no longer bit for bit.
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            pairs = zip(mine["weights"], theirs["weights"], strict=True)
            assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-4


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """In what two steps differ, bit for bit."""
    numbers = [name for name in ("lr", "loss", "grad_norm", "drawn") if one[name] != other[name]]
    weights = all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
    pairs = list(zip(one["moments"], other["moments"], strict=True))
    kinds = ("step", "exp_avg", "exp_avg_sq")
    moments = [kind for kind in kinds if not all(torch.equal(a[kind], b[kind]) for a, b in pairs)]
    return numbers + ([] if weights else ["weights"]) + moments
