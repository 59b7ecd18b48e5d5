"""A whole run with real Ray, engines, NIXL and Megatron-core, while its fleet changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

import miles
from tests.chaos.small_run import (
    QUICKSTART,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    least_available,
    read_events,
    read_summary,
    small,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_rolling_restart_during_training(tmp_path: Path) -> None:
    """Both engines restart one by one, one serves at every moment, and no group is lost."""
    folder = tmp_path / "run"
    restarted = anyio.Event()

    async def restart() -> None:
        await run.inference.rolling_restart()
        restarted.set()

    async with miles.open_run(QUICKSTART, small(folder, train__steps=30)) as run:
        async for batch in run.batches():
            stats = await run.trainer.step(batch)
            await run.publish_weights()
            if stats.step == 3:
                run.start_soon(restart)
        with anyio.fail_after(120):
            await restarted.wait()
        await run.evaluate()
    summary, events = read_summary(folder), read_events(folder)
    assert summary["status"] == "finished" and summary["steps"] == 30
    assert summary["engine_restarts"] == 2
    assert summary["weight_version"] == summary["weight_syncs"] == 31
    assert summary["staleness_max"] <= 1
    assert least_available(events) >= 1
    assert_served_only_what_was_proven(events)
    assert_account_adds_up(summary)


@pytest.mark.parametrize("transport", ["rdt", "disk"])
async def test_killed_engine_comes_back_at_the_newest_version(tmp_path: Path, transport: str) -> None:
    """`kill -9` of an engine's process: the run goes on, the engine is replaced, nothing is lost."""
    folder = tmp_path / "run"
    overrides = small(folder, train__steps=8, weight_sync__transport=transport, engines__restart__backoff_s=0.1)
    async with miles.open_run(QUICKSTART, overrides) as run:
        victim = run.inference.snapshot()[0]
        async for batch in run.batches():
            stats = await run.trainer.step(batch)
            version = await run.publish_weights()
            if stats.step == 2:
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
        await run.inference.wait_serving(version=version.number, timeout_s=120)
        replaced = run.inference.snapshot()[0]
    assert replaced.incarnation != victim.incarnation
    assert replaced.version == version.number
    summary, events = read_summary(folder), read_events(folder)
    assert summary["status"] == "finished" and summary["engine_restarts"] == 1
    # Its exit, or a call to it that breaks, whichever is noticed first.
    failed = [event["incarnation"] for event in events if event.get("state") == "Failed"]
    assert failed == [victim.incarnation]
    assert_served_only_what_was_proven(events)
    assert_account_adds_up(summary)


async def test_a_failing_task_fails_the_run(tmp_path: Path) -> None:
    """What `start_soon` runs is part of the run: its error comes out of the block, and is in the summary."""

    class Broken(Exception):
        pass

    async def fail() -> None:
        raise Broken("on purpose")

    folder = tmp_path / "run"
    with pytest.raises(Broken, match="on purpose"):
        async with miles.open_run(QUICKSTART, small(folder)) as run:
            run.start_soon(fail)
            async for batch in run.batches():
                await run.trainer.step(batch)
                await run.publish_weights()
    summary = read_summary(folder)
    assert summary["status"] == "failed" and "on purpose" in summary["error"]
    assert_account_adds_up(summary)
