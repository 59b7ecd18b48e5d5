"""A person's plain function in its worker process: deadlines, crashes, cancellation, and that nothing is left over."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import anyio
import psutil
import pytest

from controllers.errors import ActorDied
from executors.trajectory import Prompt
from miles.rewards.reward import load_reward
from miles.rewards.scorer import Scorer, ScorerOptions
from miles.rewards.worker_process import WorkerProcess
from tests.fakes.byte_encoder import ByteEncoder
from tests.miles.rewards import reward_functions

pytestmark = pytest.mark.real

FUNCTIONS = reward_functions.__name__
PROMPT = Prompt(0, tuple(b"p"), "l", "p", {"bonus": 2.5})


def _scorer(function: str, *, timeout_s: float = 30.0, workers: int = 1) -> Scorer:
    options = ScorerOptions(timeout_s=timeout_s, workers=workers)
    return Scorer(load_reward(f"{FUNCTIONS}:{function}"), ByteEncoder(), options)


def _workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "miles.rewards.worker" in child.cmdline()]


async def test_functions_are_called_in_one_process_that_is_kept_and_ended() -> None:
    """Fails when the worker does not move the function's printing away from its replies."""
    async with _scorer("process_id") as scorer:
        first = await scorer.score(PROMPT, ())
        assert first is not None and int(first) in _workers()
        assert await scorer.score(PROMPT, ()) == first
    assert not _workers()


async def test_arguments_and_fields_arrive() -> None:
    async with _scorer("length") as scorer:
        assert await scorer.score(PROMPT, tuple(b"rrr")) == 131.0
    async with _scorer("takes_bonus_only") as scorer:
        assert await scorer.score(PROMPT, ()) == 2.5
    async with _scorer("hands_on_a_coroutine") as scorer:
        assert await scorer.score(PROMPT, ()) == 0.5


async def test_a_verifier_with_an_alarm_works() -> None:
    """O02: SIGALRM needs a main thread. Fails when functions are called in a thread."""
    async with _scorer("uses_an_alarm") as scorer:
        assert await scorer.score(PROMPT, tuple(b"l")) == 1.0
        assert await scorer.score(PROMPT, tuple(b"x")) == 0.0
        assert scorer.statistics().abstained == {}


async def test_failures_are_counted_by_reason() -> None:
    async with _scorer("by_response") as scorer:
        for response in ("none", "nan", "text", "raise", "raise"):
            assert await scorer.score(PROMPT, tuple(response.encode())) is None
        assert scorer.statistics().abstained == {"abstained": 1, "not_finite": 1, "error": 3}
        assert await scorer.score(PROMPT, tuple(b"true")) == 1.0


async def test_a_function_that_hangs_is_ended_at_the_deadline_and_the_next_call_works() -> None:
    """Fails when `WorkerPool.call` keeps a worker that missed its deadline: the second call would wait behind it."""
    async with _scorer("hangs_on_request", timeout_s=0.5) as scorer:
        assert await scorer.score(PROMPT, tuple(b"fine")) == 1.0
        assert await scorer.score(PROMPT, tuple(b"hang")) is None
        assert scorer.statistics().abstained == {"timeout": 1}
        assert await scorer.score(PROMPT, tuple(b"fine")) == 1.0
        assert len(_workers()) == 1
    assert not _workers()


async def test_a_worker_that_dies_is_an_abstention() -> None:
    async with _scorer("dies") as scorer:
        assert await scorer.score(PROMPT, ()) is None
        assert await scorer.score(PROMPT, ()) is None
    assert scorer.statistics().abstained == {"crashed": 2}


async def test_a_cancelled_call_leaves_no_process_and_no_stale_answer() -> None:
    """Fails when a worker is put back after a cancelled call."""
    async with _scorer("hangs_on_request") as scorer:
        await scorer.score(PROMPT, ())
        with anyio.move_on_after(0.2) as scope:
            await scorer.score(PROMPT, tuple(b"hang"))
        assert scope.cancelled_caught and not _workers()
        assert await scorer.score(PROMPT, ()) == 1.0


async def test_the_event_loop_goes_on_while_a_function_computes() -> None:
    """Fails when plain functions are called on the event loop."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.sleep(0.005)

    async with _scorer("busy") as scorer, anyio.create_task_group() as group:
        group.start_soon(tick)
        assert await scorer.score(PROMPT, ()) == 1.0
        group.cancel_scope.cancel()
    assert ticks > 10


async def test_several_workers_run_at_the_same_time_and_no_more_than_asked_for() -> None:
    rewards: set[float | None] = set()

    async def score(scorer: Scorer) -> None:
        rewards.add(await scorer.score(PROMPT, ()))

    async with _scorer("process_id", workers=2) as scorer:
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(score, scorer)
        assert len(rewards) <= 2 and scorer.statistics().scored == 8
        assert len(_workers()) <= 2


async def test_the_wait_for_a_worker_does_not_count() -> None:
    """Eight calls of 0.3 s, one after the other, under a deadline of 1.5 s. Fails with it around the wait, too."""
    rewards: list[float | None] = []

    async def score(scorer: Scorer) -> None:
        rewards.append(await scorer.score(PROMPT, ()))

    async with _scorer("waits", timeout_s=1.5) as scorer, anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(score, scorer)
    assert rewards == [1.0] * 8


async def test_a_worker_that_cannot_load_its_function_says_why() -> None:
    with pytest.raises(ActorDied, match="cannot load 'exact_mach': ConfigError: reward: unknown name"):
        await WorkerProcess.start("exact_mach")
    assert not _workers()


def test_a_killed_driver_leaves_no_worker_also_in_mid_call() -> None:
    """Fails when the worker does not ask for a signal at its parent's death."""
    code = f"""
import anyio
from executors.trajectory import Prompt
from miles.rewards.worker_process import WorkerProcess
async def main():
    worker = await WorkerProcess.start("{FUNCTIONS}:hangs_on_request")
    print(worker._process.pid, flush=True)
    await worker.call(("p", "hang", "l", {{}}))
anyio.run(main)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as driver:
        assert driver.stdout is not None and driver.stderr is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        assert driver.stderr.readline() == b"it hangs\n"
        driver.kill()
        try:
            worker.wait(timeout=10)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
