"""A whole run whose trainer is killed, or is given a batch that no step can be made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import miles
from miles.batch_log import logged_steps
from miles.trainer.protocol import RankContext
from tests.chaos.small_run import (
    QUICKSTART,
    REPOSITORY,
    as_arguments,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    read_events,
    read_metrics,
    read_summary,
    small,
)
from tests.support.file_watch import when_written

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def process_id(context: RankContext) -> int:
    return os.getpid()


def enormous(prompt: str, response: str, label: str) -> float:
    """Rewards whose differences float32 cannot hold."""
    return 1e40 * (sum(map(ord, response)) % 7)


def roomy(folder: Path) -> dict[str, Any]:
    """Overrides that leave the engines more to do than they can while nothing is trained, idle machine or not."""
    return small(folder, train__steps=8, rollout__max_staleness=3000, checkpoint__every=3, eval__every=0)


async def test_a_killed_trainer_comes_back_while_the_engines_generate(tmp_path: Path) -> None:
    """Killed twice: in a step, and while the loop does something else. Nothing of the run is lost, nothing is twice.

    Fails without the rebuild; fails when weight sync does not open the new ranks; fails when engines are restarted.
    """
    folder = tmp_path / "run"
    tokens: dict[str, int] = {}

    async def note(kind: str, count: int) -> None:
        """How much had been generated when this happened for the `count`th time."""
        await when_written(folder, lambda: sum(e["event"] == kind for e in read_events(folder)) >= count or None)
        tokens[f"{kind} {count}"] = run.executor.statistics().tokens_generated

    async def kill_rank(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    async with miles.open_run(QUICKSTART, roomy(folder)) as run:
        before = [(engine.engine, engine.incarnation, engine.pid) for engine in run.inference.snapshot()]
        for kind in ("TrainerLost", "TrainerRebuilt"):
            run.start_soon(note, kind, 1)
            run.start_soon(note, kind, 2)
        async for batch in run.batches():
            if batch.step == 3:
                run.start_soon(kill_rank, (await run.trainer.on_each_rank(process_id))[0])
            stats = await run.trainer.step(batch)
            if stats.step == 5:
                await kill_rank((await run.trainer.on_each_rank(process_id))[0])
            version = await run.publish_weights()
            assert version.step == stats.step
            if stats.step == 3:
                await run.save_checkpoint()
        await run.inference.wait_serving(version=version.number, timeout_s=60)
        after = [(engine.engine, engine.incarnation, engine.pid) for engine in run.inference.snapshot()]
    assert after == before
    assert tokens["TrainerRebuilt 1"] > tokens["TrainerLost 1"] > 0
    assert tokens["TrainerRebuilt 2"] > tokens["TrainerLost 2"]
    summary, events = read_summary(folder), read_events(folder)
    assert (summary["status"], summary["steps"]) == ("finished", 8)
    assert (summary["trainer_restarts"], summary["engine_restarts"]) == (2, 0)
    assert summary["groups"]["trained"] == 8 * 4
    lost = [(event["incarnation"], event["step"]) for event in events if event["event"] == "TrainerLost"]
    rebuilt = [
        (event["incarnation"], event["step"], event["replayed"])
        for event in events
        if event["event"] == "TrainerRebuilt"
    ]
    assert lost == [(1, 2), (2, 5)]
    assert rebuilt == [(2, 2, 2), (3, 5, 2)]
    assert_served_only_what_was_proven(events)
    assert_account_adds_up(summary)


def run_of_bad_steps(folder: Path, policy: str) -> subprocess.CompletedProcess[str]:
    """`miles train` for two steps, each with a loss that is not a number."""
    overrides = small(
        folder,
        train__steps=2,
        eval__every=0,
        reward="tests.chaos.test_trainer_faults:enormous",
        algorithm__advantage="rloo",
        algorithm__advantage_options={},
        trainer__bad_steps=policy,
    )
    command = [sys.executable, "-m", "miles", "train", str(QUICKSTART), *as_arguments(overrides)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY, timeout=250)


def test_a_step_that_cannot_be_made_stops_the_run_and_names_the_file(tmp_path: Path) -> None:
    done = run_of_bad_steps(tmp_path / "run", "stop")
    file = tmp_path / "run" / "bad_batches" / "step-000001.msgpack"
    assert done.returncode == 1, done.stderr
    assert "error: step 1 left the weights as they were" in done.stderr and str(file) in done.stderr
    assert file.is_file() and file.with_suffix(".json").is_file()
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 0) and str(file) in summary["error"]
    assert_account_adds_up(summary)


def test_a_step_that_cannot_be_made_is_skipped_and_counted(tmp_path: Path) -> None:
    """Every publication is of the same weights, which are those of the warm-up."""
    done = run_of_bad_steps(tmp_path / "run", "skip")
    assert done.returncode == 0, done.stderr
    assert logged_steps(tmp_path / "run" / "bad_batches") == [1, 2]
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "run")] == [1.0, 2.0]
    versions = [event["version"] for event in read_events(tmp_path / "run") if event["event"] == "VersionPublished"]
    assert len(versions) == 3 and len({version["digest"] for version in versions}) == 1
    assert_account_adds_up(read_summary(tmp_path / "run"))
