"""`debug`: a run whose batches are kept, the same training from them, and rollouts without a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from executors.trajectory import Batch
from miles.batch_log import batch_file, logged_steps, read_batch
from miles.config import load_config
from miles.train_loop import EXIT_DONE, run_training
from tests.chaos.small_run import (
    QUICKSTART,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    read_events,
    read_metrics,
    read_summary,
    small,
)
from tests.support.metrics_page import always, undocumented

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

OF_THIS_RUN = frozenset({"time", "weight_version"})
"""What a replay cannot have in common with the run, besides all that is measured in seconds."""


def _run(folder: Path, **overrides: Any) -> None:
    more = {"reward": "tests.chaos.small_run:even_codes", "eval__every": 0, **overrides}
    assert run_training(load_config(QUICKSTART, small(folder, **more))) == EXIT_DONE
    assert read_summary(folder)["status"] == "finished"


def _comparable(line: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in line.items()
        if name not in OF_THIS_RUN and not name.endswith("_s") and not name.startswith("mfu")
    }


def test_a_replay_trains_as_the_run_did(tmp_path: Path) -> None:
    """Every number of every step is the same. Fails when the warm-up, an option or a batch is not."""
    _run(tmp_path / "first", train__steps=3, debug__dump_batches=True)
    first = read_metrics(tmp_path / "first")
    for line in first:
        assert not undocumented(line) and always() <= line.keys(), "docs/metrics.md"
    assert logged_steps(tmp_path / "first" / "batches") == [1, 2, 3]
    _run(tmp_path / "again", train__steps=3, debug__replay=str(tmp_path / "first" / "batches"))
    again = read_metrics(tmp_path / "again")
    assert [line["step"] for line in again] == [1, 2, 3]
    for before, after in zip(first, again, strict=True):
        assert before["grad_norm"] > 0 and not math.isnan(before["loss"])
        assert _comparable(after) == pytest.approx(_comparable(before), abs=1e-6, rel=1e-6, nan_ok=True)
    summary = read_summary(tmp_path / "again")
    assert summary["steps"] == 3 and summary["weight_version"] == 0 and summary["groups"]["dispatched"] == 0
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == b""
    assert not (tmp_path / "again" / "journal.sqlite").exists()


def test_rollouts_alone_keep_scored_batches_that_a_replay_trains(tmp_path: Path) -> None:
    """Engines serve the weights of the model's folder, proven as a trainer's are."""
    _run(tmp_path / "rollouts", train__steps=2, debug__rollout_only=True)
    events, summary = read_events(tmp_path / "rollouts"), read_summary(tmp_path / "rollouts")
    assert_served_only_what_was_proven(events)
    assert_account_adds_up(summary)
    assert summary["steps"] == 2 and summary["weight_version"] == 1 and summary["groups"]["trained"] == 0
    lines = read_metrics(tmp_path / "rollouts")
    batches = [read_batch(batch_file(tmp_path / "rollouts" / "batches", step)) for step in (1, 2)]
    for line, batch in zip(lines, batches, strict=True):
        assert line["reward"] == pytest.approx(_mean_reward(batch))
        assert line["response_length"] > 0 and "loss" not in line and "train_call_s" not in line
    assert not (tmp_path / "rollouts" / "checkpoints").exists()
    _run(tmp_path / "after", train__steps=9, debug__replay=str(tmp_path / "rollouts" / "batches"))
    assert read_summary(tmp_path / "after")["steps"] == 2
    assert [path.name for path in (tmp_path / "after" / "checkpoints").iterdir()] == ["step-000002"]


def _mean_reward(batch: Batch) -> float:
    rewards = [one.reward for group in batch.groups for one in group.trajectories if one.reward is not None]
    return sum(rewards) / len(rewards)
