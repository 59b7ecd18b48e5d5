"""`debug` picks the kind of run, each opened by its own function; kept batches come back in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from executors.trajectory import Batch
from miles.batch_log import batch_file, write_batch
from miles.config import load_config
from miles.replay_run import LoggedBatches, open_replay
from miles.rollout_run import open_rollouts
from miles.run import open_run
from miles.run_opening import kind_of
from miles.run_trainer import RunTrainer
from miles.trainer.protocol import StepStats
from tests.chaos.small_run import QUICKSTART

KINDS: dict[str, Callable[..., Any]] = {"run": open_run, "replay": open_replay, "rollout": open_rollouts}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Batches of three steps."""
    for step in (1, 2, 3):
        write_batch(batch_file(tmp_path / "batches", step), Batch((), step, ()))
    return tmp_path / "batches"


async def _steps(batches: LoggedBatches) -> list[int]:
    return [batch.step async for batch in batches]


async def test_batches_are_read_in_order_and_end_at_the_last_step(kept: Path) -> None:
    assert await _steps(LoggedBatches(kept, 100)) == [1, 2, 3]
    batches = LoggedBatches(kept, 2)
    assert batches.last_step == 2
    assert (await anext(batches)).step == 1 and await _steps(batches) == [2], "a break loses nothing"


@pytest.mark.parametrize("opened", KINDS)
@pytest.mark.parametrize("asked", KINDS)
async def test_a_kind_is_opened_by_its_own_function(asked: str, opened: str, kept: Path, tmp_path: Path) -> None:
    """Fails when `open_run` ignores what `debug` asks for. Nothing is left of a run that was refused."""
    overrides: dict[str, Any] = {"run.dir": str(tmp_path / "run"), "debug.rollout_only": asked == "rollout"}
    config = load_config(QUICKSTART, {**overrides, "debug.replay": str(kept) if asked == "replay" else None})
    assert kind_of(config) == asked
    if asked == opened:
        return
    with pytest.raises(ConfigError, match=f"debug: asks for a {asked}, and is opened as a {opened}"):
        async with KINDS[opened](config):
            pass
    assert not (tmp_path / "run").exists()


@pytest.mark.real
async def test_ranks_do_not_wait_for_gpus_that_ray_does_not_have(tmp_path: Path) -> None:
    """Fails without `_check_gpus`: the first rank's start runs into its deadline, and the error names no key."""
    overrides = {"run.dir": str(tmp_path / "run"), "trainer.device": "cuda", "trainer.data_parallel": 1000}
    with pytest.raises(ConfigError, match=r"trainer\.device: 1000 trainer ranks need a GPU each, and Ray has "):
        async with open_run(QUICKSTART, overrides):
            pass


def test_a_folder_without_batches_from_step_1_on_is_refused(kept: Path, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(QUICKSTART, {"debug.replay": str(folder)})
        return str(caught.value)

    assert refusal(tmp_path / "no").startswith("overrides: debug.replay: must be a folder of kept batches")
    batch_file(kept, 2).unlink()
    assert "must hold the batches of all steps from 1 on" in refusal(kept)


class FailingTrainer:
    """A trainer whose step fails."""

    async def step(self, batch: Batch) -> StepStats:
        raise RuntimeError("not this one")


async def test_a_batch_whose_step_fails_is_kept_too(tmp_path: Path) -> None:
    """Fails when the batch is written after the step: it is the one that somebody wants to see."""
    from miles.batch_log import BatchLog, logged_steps

    trainer: Any = FailingTrainer()
    with pytest.raises(RuntimeError):
        await RunTrainer(trainer, lambda *told: None, BatchLog(tmp_path, keep=True)).step(Batch((), 7, ()))
    assert logged_steps(tmp_path) == [7]
