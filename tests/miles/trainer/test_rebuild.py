"""A trainer whose ranks die or hang: it comes back where it stood, each update in the weights exactly once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.errors import ActorDied, ConfigError
from controllers.events import Event, TrainerLost, TrainerRebuilt
from miles.batch_log import logged_steps
from miles.trainer.faults import FaultOptions
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ParallelSizes
from miles.trainer.protocol import Example
from tests.miles.trainer.tiny import random_batch
from tests.miles.trainer.toy_ranks import (
    die_in_step,
    die_while_others_wait,
    hold_writing,
    pid_of,
    plugins_of,
    start_toy,
    state_of,
    wait_for_ever,
)
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session

pytestmark = pytest.mark.real

NOTICE_S = 5.0
OPTIONS = TrainerOptions(Path("/toy"), parallel=ParallelSizes(data=2))
EXAMPLES = [Example((1, 2, 3), (4, 5, 6)), Example((7, 8), (9,))]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with ray_session():
        yield


class Watched:
    """A trainer over toy ranks, and what it told."""

    def __init__(self, options: TrainerOptions = OPTIONS, **faults: Any) -> None:
        self.events: list[Event] = []
        self.news = anyio.Event()
        self.trainer = MegatronTrainer(
            options, faults=FaultOptions(**faults), on_event=self._note, start=start_toy, name="toy"
        )

    async def until(self, kind: type[Event]) -> Event:
        """The first event of a kind."""
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    return event
            await self.news.wait()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.news.set()
        self.news = anyio.Event()


async def unbroken(steps: int) -> tuple[int, int]:
    """The state after two warm-up steps and so many steps without a fault."""
    async with Watched().trainer as trainer:
        return await learn(trainer, 1, steps, warmups=2)


async def learn(trainer: MegatronTrainer, first: int, last: int, *, warmups: int = 0) -> tuple[int, int]:
    for index in range(warmups):
        await trainer.warmup_step(EXAMPLES, 0.1 * (index + 1))
    for step in range(first, last + 1):
        assert (await trainer.step(random_batch(step))).step == step
    states: list[tuple[int, int]] = await trainer.on_each_rank(state_of)
    assert len(set(states)) == 1
    return states[0]


@pytest.fixture(scope="module")
def expected() -> tuple[int, int]:
    """After two warm-up steps and seven steps."""
    return anyio.run(unbroken, 7)


async def test_death_after_death_each_update_counts_once(expected: tuple[int, int], tmp_path: Path) -> None:
    """In the warm-up, in a step, while idle, and before and after a checkpoint.

    Fails when `restore` forgets the warm-up, the checkpoint or the log, and when the call is not made again.
    """
    watched = Watched(folder=tmp_path, rebuilds=4)
    async with watched.trainer as trainer:
        await trainer.warmup_step(EXAMPLES, 0.1)
        with pytest.raises(ActorDied):  # what plugins kept is gone: not for the trainer to repeat
            await trainer.on_each_rank(die_while_others_wait, 0)
        assert trainer.incarnation == 2
        await trainer.warmup_step(EXAMPLES, 0.2)
        await learn(trainer, 1, 1)
        await trainer.on_each_rank(die_in_step, 1, 2)
        await learn(trainer, 2, 3)
        assert trainer.incarnation == 3
        await trainer.save(tmp_path / "checkpoints" / "step-3")
        assert logged_steps(tmp_path / "batches") == []
        await learn(trainer, 4, 5)
        assert logged_steps(tmp_path / "batches") == [4, 5]
        watched.events.clear()
        pids = await trainer.on_each_rank(pid_of)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        lost = await watched.until(TrainerLost)
        assert time.monotonic() - began < NOTICE_S
        assert isinstance(lost, TrainerLost) and (lost.incarnation, lost.step) == (3, 5)
        rebuilt = await watched.until(TrainerRebuilt)  # without any call
        assert isinstance(rebuilt, TrainerRebuilt)
        assert (rebuilt.incarnation, rebuilt.step, rebuilt.replayed) == (4, 5, 2)
        await trainer.on_each_rank(die_in_step, 0, 6)
        assert await learn(trainer, 6, 7) == expected
        assert trainer.steps_done == 7 and trainer.rebuilds == 4


async def test_a_stopped_rank_is_replaced_too(tmp_path: Path) -> None:
    options = TrainerOptions(Path("/toy"), parallel=ParallelSizes(data=2), call_timeout_s=2.0)
    watched = Watched(options, folder=tmp_path)
    async with watched.trainer as trainer:
        state = await learn(trainer, 1, 1)
        pids = await trainer.on_each_rank(pid_of)
        os.kill(pids[1], signal.SIGSTOP)
        assert (await trainer.step(random_batch(2))).step == 2
        lost = await watched.until(TrainerLost)
        assert isinstance(lost, TrainerLost) and "did not return within 2.0 s" in lost.reason
        assert await wait_gone_async(pids, 30) == []
        assert (await trainer.on_each_rank(state_of))[0] != state


async def test_the_budget_ends(tmp_path: Path) -> None:
    """Fails when `rebuilds` is not looked at: the call would wait for the fourth group."""
    watched = Watched(folder=tmp_path, rebuilds=1)
    async with watched.trainer as trainer:
        await learn(trainer, 1, 1)
        await trainer.on_each_rank(die_in_step, 0, 2)
        await trainer.step(random_batch(2))
        await trainer.on_each_rank(die_in_step, 0, 3)
        with anyio.fail_after(30), pytest.raises(ActorDied, match=r"after 1 rebuilds \(trainer\.rebuilds\)"):
            await trainer.step(random_batch(3))
        with pytest.raises(ActorDied, match="after 1 rebuilds"):
            await trainer.on_each_rank(state_of)
        assert trainer.steps_done == 2
        assert [type(event) for event in watched.events] == [TrainerLost, TrainerRebuilt, TrainerLost]


async def test_a_checkpoint_counts_when_it_is_whole(tmp_path: Path) -> None:
    """Lost while they write, with training gone on: the checkpoint is not there, and every batch since still is.

    Fails when batches are forgotten once a checkpoint was copied.
    """
    watched = Watched(folder=tmp_path)
    target = tmp_path / "checkpoints" / "step-2"
    async with watched.trainer as trainer:
        await learn(trainer, 1, 2)
        pids = await trainer.on_each_rank(pid_of)
        await trainer.on_each_rank(hold_writing, True)
        copied = anyio.Event()

        async def lost_save() -> None:
            with pytest.raises(ActorDied):
                await trainer.save(target, copied.set)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lost_save)
            with anyio.fail_after(30):
                await copied.wait()
            state = await learn(trainer, 3, 3)  # goes on while it is being written
            assert not target.exists()
            os.kill(pids[1], signal.SIGKILL)
        assert logged_steps(tmp_path / "batches") == [1, 2, 3]
        assert (await trainer.on_each_rank(state_of))[0] == state
        assert not target.exists()
        await trainer.save(target)
        assert target.exists() and logged_steps(tmp_path / "batches") == []


async def test_a_save_that_training_waits_for_is_made_again(tmp_path: Path) -> None:
    watched = Watched(folder=tmp_path)
    async with watched.trainer as trainer:
        await learn(trainer, 1, 1)
        pids = await trainer.on_each_rank(pid_of)
        await trainer.on_each_rank(hold_writing, True)

        def kill() -> None:
            if trainer.incarnation == 1:
                os.kill(pids[0], signal.SIGKILL)

        await trainer.save(tmp_path / "checkpoint", kill)
        assert (tmp_path / "checkpoint").exists() and logged_steps(tmp_path / "batches") == []


async def test_what_cannot_be_repeated_is_an_error() -> None:
    """Without a folder there is no batch to train again: never go on from older weights in silence."""
    watched = Watched()
    async with watched.trainer as trainer:
        await learn(trainer, 1, 1)
        await trainer.on_each_rank(die_in_step, 1, 2)
        with pytest.raises(ActorDied, match="step 1 cannot be trained again"):
            await trainer.step(random_batch(2))


async def test_plugins_of_new_ranks_are_empty_and_calls_wait_for_them(tmp_path: Path) -> None:
    watched = Watched(folder=tmp_path)
    entered = tmp_path / "entered"
    entered.mkdir()
    async with watched.trainer as trainer:
        await trainer.on_each_rank(die_in_step, -1, 0)
        async with anyio.create_task_group() as tasks:

            async def stuck() -> None:
                with pytest.raises(ActorDied):
                    await trainer.on_each_rank(wait_for_ever, entered)

            pids = await trainer.on_each_rank(pid_of)
            tasks.start_soon(stuck)
            await when_written(entered, lambda: (entered / "1").exists() or None)
            os.kill(pids[1], signal.SIGKILL)
        assert trainer.incarnation == 2
        assert await trainer.on_each_rank(plugins_of) == [{}, {}]


async def test_ranks_that_do_not_come_up_are_no_endless_loop(tmp_path: Path) -> None:
    """The first group is not tried again; a model that is refused is the error itself."""
    for name, error, match in (("broken", ConfigError, "no such model"), ("deadly", ActorDied, "toy.1-1 died")):
        watched = Watched(TrainerOptions(Path("/") / name, parallel=ParallelSizes(data=2)), folder=tmp_path)
        with pytest.raises(error, match=match):
            async with watched.trainer:
                raise AssertionError("not reached")


async def test_leaving_while_it_is_being_rebuilt_leaves_no_rank(tmp_path: Path) -> None:
    watched = Watched(folder=tmp_path)
    async with watched.trainer as trainer:
        pids = await trainer.on_each_rank(pid_of)
        os.kill(pids[0], signal.SIGKILL)
        await watched.until(TrainerLost)
    assert await wait_gone_async(pids, 20) == []
    with pytest.raises(ActorDied, match="has been left"):
        await trainer.step(random_batch(1))
