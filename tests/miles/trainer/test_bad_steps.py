"""Bad steps as the driver sees them: kept, counted, and the end of training where that was asked for."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from miles.batch_log import read_batch
from miles.trainer.bad_steps import BadSteps
from miles.trainer.faults import BadStep, FaultOptions
from miles.trainer.protocol import StepStats
from tests.miles.trainer.tiny import random_batch


def stats(step: int, *, skipped: bool, trained: float = 10.0) -> StepStats:
    metrics = {"skipped": float(skipped), "tokens_trained": trained, "loss": math.nan, "grad_norm": math.inf}
    return StepStats(step, metrics)


async def test_a_bad_step_is_kept_for_study_and_training_goes_on(tmp_path: Path) -> None:
    bad_steps = BadSteps(FaultOptions(folder=tmp_path))
    await bad_steps.look(random_batch(1), stats(1, skipped=False))
    await bad_steps.look(random_batch(2), stats(2, skipped=True))
    await bad_steps.look(random_batch(3), stats(3, skipped=True, trained=0.0))  # nothing to train: nothing is wrong
    kept = tmp_path / "bad_batches"
    assert sorted(path.name for path in kept.iterdir()) == ["step-000002.json", "step-000002.msgpack"]
    assert read_batch(kept / "step-000002.msgpack") == random_batch(2)
    metrics = json.loads((kept / "step-000002.json").read_text())
    assert metrics == {"step": 2, "skipped": 1.0, "tokens_trained": 10.0, "loss": "nan", "grad_norm": "inf"}


async def test_stop_raises_and_names_the_file(tmp_path: Path) -> None:
    bad_steps = BadSteps(FaultOptions(folder=tmp_path, bad_steps="stop"))
    with pytest.raises(BadStep, match="step 12 left the weights as they were: loss nan, gradient norm inf") as caught:
        await bad_steps.look(random_batch(12), stats(12, skipped=True))
    assert caught.value.step == 12
    assert caught.value.file.is_file() and str(caught.value.file) in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).file == caught.value.file


async def test_too_many_in_a_row_stop_it_too() -> None:
    """Fails when a good step does not begin the count anew, or when nobody counts."""
    bad_steps = BadSteps(FaultOptions(max_bad_steps_in_a_row=3))
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        await bad_steps.look(random_batch(step), stats(step, skipped=skipped))
    with pytest.raises(BadStep, match="3 such steps in a row"):
        await bad_steps.look(random_batch(6), stats(6, skipped=True))


@pytest.mark.parametrize("values", [{"rebuilds": -1}, {"max_bad_steps_in_a_row": 0}, {"bad_steps": "ignore"}])
def test_values_that_cannot_work_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(values))}"):
        FaultOptions(**values)  # type: ignore[arg-type]
