"""A group of real processes: how a death, a hang and an error of one rank come out, and how soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from controllers.errors import ActorDied, ConfigError, MilesError, WaitTimeout
from miles.cluster.actors import ActorOptions, RemoteActor
from miles.trainer import rank_group
from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ParallelSizes
from miles.trainer.rank_group import RankGroup
from tests.miles.trainer.toy_ranks import (
    fail_unless,
    pid_of,
    refuse_on,
    start_toy,
    thread_of,
    wait_for_ever,
    wait_for_word,
)
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session

pytestmark = pytest.mark.real

NOTICE_S = 5.0
OPTIONS = TrainerOptions(Path("/toy"), parallel=ParallelSizes(data=2))


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with ray_session():
        yield


@asynccontextmanager
async def a_group(
    reasons: list[MilesError], start: Callable[..., RemoteActor] = start_toy
) -> AsyncIterator[RankGroup]:
    """Two toy ranks, watched."""
    group = RankGroup.start(OPTIONS, "toy.1", start, reasons.append)
    try:
        await group.open(30.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.watch)
            yield group
            group.end()
    finally:
        group.end()


class TellingActor:
    """A rank that says when it hands the group an error which it raised itself."""

    def __init__(self, actor: RemoteActor, heard: anyio.Event) -> None:
        self._actor = actor
        self._heard = heard
        self.kill = actor.kill

    async def call(self, method: str, /, *args: Any, **how: Any) -> Any:
        try:
            return await self._actor.call(method, *args, **how)
        except RuntimeError:
            self._heard.set()
            raise


async def run(group: RankGroup, function: Any, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    return await group.call("run_function", function, args, {}, timeout_s=timeout_s)


async def test_calls_of_a_group_that_works(tmp_path: Path) -> None:
    """One thread for all calls, errors of one rank and a cancelled caller leave the group as it is."""
    reasons: list[MilesError] = []
    async with a_group(reasons) as group:
        pids = await run(group, pid_of)
        assert len(set(pids)) == len(group) == 2
        assert await run(group, thread_of) == await run(group, thread_of)  # torch keeps its thread count per thread
        with pytest.raises(ConfigError, match="not with rank 1"):
            await run(group, refuse_on, 1, False)
        pipes = [tmp_path / str(rank) for rank in range(len(group))]
        for pipe in pipes:
            os.mkfifo(pipe)
        with anyio.move_on_after(0.5) as scope:
            await run(group, wait_for_word, tmp_path)
        assert scope.cancelled_caught
        for pipe in pipes:
            await anyio.to_thread.run_sync(pipe.write_text, "go on")
        assert await run(group, pid_of) == pids
        assert group.loss is None
    assert reasons == []
    assert await wait_gone_async(pids, 20) == []


async def test_a_death_is_noticed_while_nobody_calls() -> None:
    """Fails without the pending `watch` calls."""
    reasons: list[MilesError] = []
    async with a_group(reasons) as group:
        pids = await run(group, pid_of)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with anyio.fail_after(NOTICE_S):
            await group.lost()
        assert time.monotonic() - began < NOTICE_S
        assert isinstance(group.loss, ActorDied) and group.loss.actor == "toy.1-1"
        assert reasons == [group.loss]
        with pytest.raises(ActorDied):
            await run(group, pid_of)
        assert await wait_gone_async(pids, 20) == []  # the others were killed with it


async def test_a_death_is_noticed_while_the_others_are_stuck_in_a_collective(tmp_path: Path) -> None:
    reasons: list[MilesError] = []
    async with a_group(reasons) as group:
        pids = await run(group, pid_of)
        killed = 0.0

        async def kill_it() -> None:
            nonlocal killed
            await when_written(tmp_path, lambda: len(list(tmp_path.iterdir())) == len(pids) or None)
            killed = time.monotonic()
            os.kill(pids[0], signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_it)
            with pytest.raises(ActorDied):
                await run(group, wait_for_ever, tmp_path)
        assert time.monotonic() - killed < NOTICE_S
        assert await wait_gone_async(pids, 20) == []


async def test_a_peers_broken_connection_is_taken_for_the_death_behind_it() -> None:
    """Fails when the first error that arrives is raised: it is of a rank that did nothing wrong."""
    reasons: list[MilesError] = []
    heard = anyio.Event()

    def start(*args: Any, options: ActorOptions) -> RemoteActor:
        return cast(RemoteActor, TellingActor(start_toy(*args, options=options), heard))

    async with a_group(reasons, start) as group:
        pids = await run(group, pid_of)

        async def kill_it() -> None:
            await heard.wait()
            os.kill(pids[1], signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_it)
            with anyio.fail_after(30), pytest.raises(ActorDied):
                await run(group, fail_unless, 1)
        assert len(reasons) == 1


async def test_an_error_that_leaves_the_others_waiting_loses_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the deadline after an error: the call would wait for its own, minutes later."""
    monkeypatch.setattr(rank_group, "SETTLE_S", 0.3)
    reasons: list[MilesError] = []
    async with a_group(reasons) as group:
        with anyio.fail_after(10), pytest.raises(ConfigError, match="not with rank 0"):
            await run(group, refuse_on, 0, True)
        assert isinstance(group.loss, ActorDied) and "ranks 1 did not answer" in str(group.loss)


async def test_a_stopped_rank_runs_into_the_deadline_and_is_killed() -> None:
    reasons: list[MilesError] = []
    async with a_group(reasons) as group:
        pids = await run(group, pid_of)
        os.kill(pids[1], signal.SIGSTOP)
        with anyio.fail_after(NOTICE_S), pytest.raises(WaitTimeout, match=r"toy\.1-1"):
            await run(group, pid_of, timeout_s=1.0)
        assert isinstance(group.loss, WaitTimeout)
        assert await wait_gone_async(pids, 30) == []
