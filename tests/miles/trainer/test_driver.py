"""The driver's side over a fake rank: deadlines, order of calls, clean-up."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.errors import ActorDied
from miles.trainer.faults import FaultOptions
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import StepStats
from tests.miles.trainer.tiny import random_batch

OPTIONS = TrainerOptions(Path("model"), start_timeout_s=7.0, call_timeout_s=3.0)


class FakeRank:
    """Answers `step`; holds each call until its gate opens. Records what it was asked and with which deadline."""

    def __init__(self, dies_in: str = "") -> None:
        self.calls: list[tuple[str, float | None]] = []
        self.gate = anyio.Event()
        self.gate.set()
        self.killed = False
        self._dies_in = dies_in

    async def call(self, method: str, /, *args: Any, timeout_s: float | None = None, thread: str | None = None) -> Any:
        if thread is not None:
            await anyio.sleep_forever()
        self.calls.append((method, timeout_s))
        await self.gate.wait()
        if method == self._dies_in:
            raise ActorDied("gone", actor="fake")
        return StepStats(args[0].step, {}) if method == "step" else 12

    def kill(self) -> None:
        self.killed = True


def trainer_over(rank: FakeRank) -> MegatronTrainer:
    no_rebuild = FaultOptions(rebuilds=0)
    return MegatronTrainer(OPTIONS, faults=no_rebuild, start=lambda *_args, **_options: rank)  # type: ignore[arg-type]


async def test_starting_and_calling_have_their_own_deadlines() -> None:
    rank = FakeRank()
    async with trainer_over(rank) as trainer:
        await trainer.step(random_batch(1))
        await trainer.load(Path("checkpoint"))
        assert trainer.steps_done == 12
    assert rank.calls == [("rendezvous", 7.0), ("open", 7.0), ("step", 3.0), ("load", 3.0)]
    assert rank.killed


async def test_calls_reach_the_ranks_one_at_a_time() -> None:
    """Fails without the lock in MegatronTrainer."""
    rank = FakeRank()
    async with trainer_over(rank) as trainer, anyio.create_task_group() as tasks:
        rank.gate = anyio.Event()
        tasks.start_soon(trainer.step, random_batch(1))
        tasks.start_soon(trainer.logprobs, [])
        await anyio.wait_all_tasks_blocked()
        assert [method for method, _ in rank.calls] == ["rendezvous", "open", "step"]
        rank.gate.set()


async def test_an_error_comes_out_as_itself_and_does_not_count_as_a_step() -> None:
    async with trainer_over(FakeRank(dies_in="step")) as trainer:
        with pytest.raises(ActorDied, match="gone"):
            await trainer.step(random_batch(1))
        assert trainer.steps_done == 0


async def test_a_rank_that_fails_to_open_is_killed() -> None:
    """Fails without the clean-up in __aenter__."""
    rank = FakeRank(dies_in="open")
    with pytest.raises(ActorDied):
        async with trainer_over(rank):
            raise AssertionError("not reached")
    assert rank.killed


async def test_cancelling_a_call_is_not_swallowed() -> None:
    rank = FakeRank()
    async with trainer_over(rank) as trainer:
        rank.gate = anyio.Event()
        with anyio.move_on_after(0.01) as scope:
            await trainer.step(random_batch(1))
        assert scope.cancelled_caught
        assert trainer.steps_done == 0
