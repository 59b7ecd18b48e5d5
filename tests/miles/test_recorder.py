"""How a run ends in its folder: the summary tells the truth on every way out, and nothing hides the run's own error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from controllers.errors import ActorDied
from controllers.weight_versions import WeightVersion
from executors.group_account import GroupAccount
from executors.rollout_executor import RolloutExecutor
from executors.trajectory import Batch
from miles.config import RunConfig, load_config
from miles.recorder import RunRecorder
from miles.trainer.protocol import StepStats
from tests.chaos.small_run import QUICKSTART


def _config(folder: Path, **more: Any) -> RunConfig:
    return load_config(QUICKSTART, {"run.dir": str(folder), "telemetry.progress": "plain", **more})


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_an_error_during_start_up_comes_out_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the plot on. Fails when `_plot` may raise: there is nothing to draw yet."""
    with pytest.raises(ActorDied, match="the true cause"), RunRecorder(_config(tmp_path / "run")):
        raise ActorDied("the true cause", actor="trainer-0")
    summary = _summary(tmp_path / "run")
    assert (summary["status"], summary["error"]) == ("failed", "the true cause")
    assert "failed after 0 steps" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn_does_not_fail_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the boundary in `_plot`."""

    def broken(folder: Path) -> Path:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("miles.telemetry.plot.plot_run", broken)
    with RunRecorder(_config(tmp_path / "run")) as recorder:
        recorder._summary.add_step(1, 0.5, 0)
    assert _summary(tmp_path / "run")["status"] == "finished"


def test_a_full_disk_at_the_end_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when an error of the last line leaves `status: finished`."""

    def full(self: RunRecorder) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunRecorder, "_close_step", full)
    with pytest.raises(OSError, match="No space left"), RunRecorder(_config(tmp_path / "run")):
        pass
    assert _summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("stop", [asyncio.CancelledError, KeyboardInterrupt])
def test_a_stop_is_no_failure(tmp_path: Path, stop: type[BaseException]) -> None:
    with pytest.raises(stop), RunRecorder(_config(tmp_path / "run")):
        raise stop
    summary = _summary(tmp_path / "run")
    assert summary["status"] == "stopped" and "error" not in summary


def test_a_line_waits_for_its_publication_and_no_other(tmp_path: Path) -> None:
    """Fails when a step that publishes nothing is written only with the next one: a stop would lose it."""
    batch = Batch((), 1, (1, 0))
    with RunRecorder(_config(tmp_path / "run", **{"telemetry.plot": False})) as recorder:
        recorder.step_done(batch, StepStats(1, {"reward": 0.5}), {"wait_s": 1.0}, publishes=True)
        assert _metrics(tmp_path / "run") == []
        recorder.published(WeightVersion(2, 1, 1, "0"), 0.1, 0.2, 0.3)
        recorder.step_done(batch, StepStats(2, {"reward": 0.25}), {"train_call_s": 2.0})
        first, second = _metrics(tmp_path / "run")
    assert (first["weight_version"], first["wait_s"], first["publish_s"]) == (2, 1.0, 0.1)
    assert (second["weight_version"], second["train_call_s"], second["reward"]) == (None, 2.0, 0.25)
    assert second["staleness"] == 1 and second["staleness_mean"] == 0.5 and "publish_s" not in second


def test_tokens_from_before_the_clock_do_not_count(tmp_path: Path) -> None:
    """Fails when the first step is given the tokens that were made while engines started."""

    class Executor:
        account = GroupAccount()
        tokens_generated = 1000

        def statistics(self) -> Executor:
            return self

    executor = Executor()
    with RunRecorder(_config(tmp_path / "run", **{"telemetry.plot": False})) as recorder:
        recorder.watch(cast(RolloutExecutor, executor))
        recorder.start_clock()
        recorder.step_done(Batch((), 1, (0,)), StepStats(1, {"reward": 0.5}), {})
    assert _metrics(tmp_path / "run")[0]["tokens_per_s"] == 0.0


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
