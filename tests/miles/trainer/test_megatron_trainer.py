"""The trainer as the driver sees it: a real Ray actor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from controllers.errors import ActorDied, ConfigError, WaitTimeout
from miles.trainer.faults import FaultOptions
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, RankContext, Trainer
from tests.miles.trainer.tiny import random_batch, write_model
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session

pytestmark = pytest.mark.real

EXAMPLES = [Example((1, 2, 3), (4, 5, 6)), Example((7, 8), (9,))]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with ray_session():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def process_id(context: RankContext) -> int:
    return os.getpid()


def remember(context: RankContext, value: str, *, times: int) -> tuple[int, int, str]:
    context.plugins["memory"] = context.plugins.get("memory", "") + value * times
    return context.rank, context.world_size, context.plugins["memory"]


def total_of_boxes(context: RankContext) -> dict[str, float]:
    totals: dict[str, float] = {}
    for shard in context.shards():
        totals[shard.name] = totals.get(shard.name, 0.0) + float(shard.tensor.double().sum())
    return totals


def sleep_for(context: RankContext, seconds: float) -> None:
    time.sleep(seconds)


def refuse(context: RankContext) -> None:
    raise ConfigError("not with me", key="k")


async def test_a_run_of_the_trainer(model: Path, tmp_path: Path) -> None:
    """The whole protocol over one rank, up to the moment it is killed in the middle of a call."""
    async with MegatronTrainer(TrainerOptions(model), faults=FaultOptions(rebuilds=0)) as made:
        trainer: Trainer = made
        losses = [(await trainer.warmup_step(EXAMPLES, 1e-2)).metrics["loss"] for _ in range(6)]
        assert losses[-1] < 0.5 * losses[0]
        assert trainer.steps_done == 0
        await trainer.save(tmp_path / "checkpoint")

        before = (await trainer.on_each_rank(total_of_boxes))[0]
        stats = await trainer.step(random_batch(1))
        assert stats.step == trainer.steps_done == 1
        after = (await trainer.on_each_rank(total_of_boxes))[0]
        assert before != after

        await trainer.load(tmp_path / "checkpoint")
        assert trainer.steps_done == 0
        assert (await trainer.on_each_rank(total_of_boxes))[0] == before

        assert await trainer.on_each_rank(remember, "ab", times=2) == [(0, 1, "abab")]
        assert await trainer.on_each_rank(remember, "c", times=1) == [(0, 1, "ababc")]
        with pytest.raises(ConfigError, match="not with me"):
            await trainer.on_each_rank(refuse)

        (values,) = await trainer.logprobs([((1, 2, 3), (4, 5, 6))])
        assert len(values) == 3 and max(values) < 0
        await trainer.export(tmp_path / "export")
        assert (tmp_path / "export" / "model.safetensors").is_file()

        (pid,) = await trainer.on_each_rank(process_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_death, trainer)
            await anyio.wait_all_tasks_blocked()
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied):
            await trainer.step(random_batch(1))


async def _expect_death(trainer: Trainer) -> None:
    """A call that the rank would take minutes for fails soon after the rank is killed."""
    with anyio.fail_after(20), pytest.raises(ActorDied) as caught:
        await trainer.on_each_rank(sleep_for, 300.0)
    assert caught.value.actor == "trainer.1-0"


async def test_leaving_the_trainer_ends_its_rank(model: Path) -> None:
    """Fails without the kill in __aexit__. The rank is busy when the trainer is left."""
    options = TrainerOptions(model, call_timeout_s=2.0)
    async with MegatronTrainer(options, faults=FaultOptions(rebuilds=0)) as trainer:
        (pid,) = await trainer.on_each_rank(process_id)
        with pytest.raises(WaitTimeout, match="run_function"):
            await trainer.on_each_rank(sleep_for, 300.0)
    assert await wait_gone_async([pid], 20) == []


async def test_a_model_that_cannot_be_loaded_says_so_and_leaves_no_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        async with MegatronTrainer(TrainerOptions(tmp_path)):
            raise AssertionError("not reached")


def test_the_driver_side_does_not_import_torch() -> None:
    code = "import sys, miles.trainer.megatron; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
