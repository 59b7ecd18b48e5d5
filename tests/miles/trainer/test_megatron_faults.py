"""Two real data-parallel ranks: killed in a step and while idle, and given a batch that makes the loss NaN."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.events import Event, TrainerLost, TrainerRebuilt
from executors.trajectory import Batch
from miles.batch_log import batch_file, logged_steps, read_batch
from miles.trainer.faults import FaultOptions
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ParallelSizes
from miles.trainer.protocol import Example, RankContext, StepStats
from tests.miles.trainer.tiny import random_batch, write_model
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

NOTICE_S = 5.0
EXAMPLES = [Example((1, 2, 3), (4, 5, 6)), Example((7, 8), (9,)), Example((9,), (3, 3))]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with ray_session():
        yield


def process_id(context: RankContext) -> int:
    return os.getpid()


def announce_collectives(context: RankContext, file: Path) -> None:
    """From now on rank 0 leaves `file` behind when it enters a collective."""
    if context.rank != 0:
        return
    from torch import distributed

    def announced(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            file.touch()
            return collective(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
        setattr(distributed, name, announced(getattr(distributed, name)))


def weights_of(context: RankContext) -> str:
    """A digest of every bit of this rank's weights."""
    digest = hashlib.sha256()
    for shard in context.shards():
        digest.update(shard.name.encode() + shard.tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


async def weights(trainer: MegatronTrainer) -> str:
    (every,) = set(await trainer.on_each_rank(weights_of))
    return every


def numbers(stats: StepStats) -> dict[str, float]:
    return {name: value for name, value in stats.metrics.items() if not name.endswith(("_s", "_per_s"))}


def poisoned(batch: Batch) -> Batch:
    """The same batch with one logprob that is not a number, as a broken engine might send it."""
    first, *rest = batch.groups
    member, *others = first.trajectories
    bad = replace(member, logprobs=(math.nan, *member.logprobs[1:]))
    return replace(batch, groups=(replace(first, trajectories=(bad, *others)), *rest))


class Heard:
    """Every event with the time it came."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self._news = anyio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append((time.monotonic(), event))
        self._news.set()
        self._news = anyio.Event()

    async def after(self, count: int, kind: type[Event]) -> tuple[float, Event]:
        """The first event of a kind after `count` events."""
        while True:
            for at, event in self.events[count:]:
                if isinstance(event, kind):
                    return at, event
            await self._news.wait()


async def test_killed_in_a_step_and_while_idle_and_given_nan(tmp_path: Path) -> None:
    """Final weights, bit for bit, and every metric are those of an unbroken run. A NaN loss changes nothing.

    Fails when the step in progress is lost or trained twice, or when a rebuild forgets batch, checkpoint or warm-up.
    """
    options = TrainerOptions(write_model(tmp_path / "model"), lr=1e-2, parallel=ParallelSizes(data=2))
    heard = Heard()
    async with MegatronTrainer(options, faults=FaultOptions(folder=tmp_path), on_event=heard) as trainer:
        for _ in range(2):
            await trainer.warmup_step(EXAMPLES, 1e-2)
        await trainer.save(tmp_path / "checkpoint")
        unbroken = [numbers(await trainer.step(random_batch(step))) for step in range(1, 5)]
        expected = await weights(trainer)

        await trainer.load(tmp_path / "checkpoint")
        assert await weights(trainer) != expected
        broken = [numbers(await trainer.step(random_batch(step))) for step in (1, 2)]
        pids = await trainer.on_each_rank(process_id)
        entered = tmp_path / "entered" / "collective"
        entered.parent.mkdir()
        await trainer.on_each_rank(announce_collectives, entered)
        os.kill(pids[1], signal.SIGSTOP)  # so that rank 0 waits for it in a collective

        async def step_three() -> None:
            broken.append(numbers(await trainer.step(random_batch(3))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step_three)
            await when_written(entered.parent, lambda: entered.exists() or None)
            killed = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            noticed, event = await heard.after(0, TrainerLost)
        assert noticed - killed < NOTICE_S
        assert isinstance(event, TrainerLost) and event.step == 2
        assert await wait_gone_async(pids, 20) == []
        broken.append(numbers(await trainer.step(random_batch(4))))
        assert await weights(trainer) == expected
        assert broken == unbroken
        assert trainer.steps_done == 4

        so_far = len(heard.events)
        pids = await trainer.on_each_rank(process_id)
        os.kill(pids[0], signal.SIGKILL)
        await heard.after(so_far, TrainerRebuilt)
        assert await weights(trainer) == expected
        assert logged_steps(tmp_path / "batches") == [1, 2, 3, 4]

        bad = poisoned(random_batch(5))
        stats = await trainer.step(bad)
        assert (stats.step, stats.metrics["skipped"], stats.metrics["skipped_steps"]) == (5, 1.0, 1.0)
        assert await weights(trainer) == expected
        file = batch_file(tmp_path / "bad_batches", 5)
        assert repr(read_batch(file)) == repr(bad)
        assert json.loads(file.with_suffix(".json").read_text())["loss"] == "nan"
        assert (await trainer.step(random_batch(6))).metrics["skipped"] == 0.0
        assert await weights(trainer) != expected
