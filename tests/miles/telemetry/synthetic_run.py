"""Writes the files of a run that never was: two engines, a rolling restart, one crash."""

from __future__ import annotations

import math
import random
from pathlib import Path

from controllers.events import (
    EngineRestarted,
    EngineStateChanged,
    RollingRestartFinished,
    RollingRestartStarted,
    VersionPublished,
)
from controllers.weight_versions import WeightVersion
from miles.telemetry.run_folder import RunFolder

START = 1_700_000_000.0
STEP_S = 0.6


class SyntheticRun:
    """Drives a RunFolder step by step, as a recorder would."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._now = START
        self._states: dict[str, str | None] = {"engine-0": None, "engine-1": None}
        self._lives = {"engine-0": 0, "engine-1": 0}
        self._random = random.Random(0)

    def write(self, steps: int) -> None:
        """Write `steps` steps; the rolling restart begins at a third, engine-0 crashes at two thirds."""
        for engine in self._states:
            self._come_up(engine, version=1)
        self._publish(1)
        self._folder.append_eval({"step": 0, "time": self._now, "reward": 0.35})
        for step in range(1, steps + 1):
            self._now += STEP_S
            if step == steps // 3:
                self._rolling_restart(step)
            if step == 2 * steps // 3:
                self._change("engine-0", "Failed", reason="exit code -9")
                self._come_up("engine-0", version=step)
            self._publish(step + 1)
            for engine in self._states:
                self._change(engine, "Updating", step)
                self._now += 0.02
                self._change(engine, "Serving", step + 1)
            reward = 0.85 - 0.6 * math.exp(-3 * step / steps) + self._random.gauss(0, 0.04)
            self._folder.append_metrics(
                {"step": step, "time": self._now, "reward": reward, "tokens_per_s": 3000, "weight_version": step + 1,
                 "staleness": int(step > 2 and self._random.random() > 0.2), "entropy": 1 / step, "kl": None,
                 "response_length": 5.0, "grad_norm": self._random.random(), "step_s": 0.6, "wait_s": 0.2}
            )  # fmt: skip
            if step % max(1, steps // 10) == 0:
                self._folder.append_eval({"step": step, "time": self._now, "reward": min(1.0, reward + 0.1)})

    def _rolling_restart(self, version: int) -> None:
        engines = tuple(self._states)
        self._folder.write_event(self._now, RollingRestartStarted(engines, 1))
        for restarts, engine in enumerate(engines, start=1):
            self._change(engine, "Draining")
            self._now += 2
            self._come_up(engine, version)
            life = f"{engine}.{self._lives[engine]}"
            self._folder.write_event(self._now, EngineRestarted(engine, life, planned=True, restarts=restarts))
        self._folder.write_event(self._now, RollingRestartFinished(engines, "finished"))

    def _come_up(self, engine: str, version: int) -> None:
        self._lives[engine] += 1
        self._change(engine, "Launching")
        self._now += 6
        self._change(engine, "Syncing")
        self._now += 1.5
        self._change(engine, "Serving", version)

    def _change(self, engine: str, state: str, version: int | None = None, reason: str | None = None) -> None:
        life = f"{engine}.{self._lives[engine]}"
        event = EngineStateChanged(engine, life, state, self._states[engine], reason, version)
        self._states[engine] = state
        self._folder.write_event(self._now, event)

    def _publish(self, number: int) -> None:
        self._now += 0.05
        self._folder.write_event(self._now, VersionPublished(WeightVersion(number, number - 1, 0, "0" * 16)))


def write_synthetic_run(path: Path, steps: int) -> None:
    """Write a run folder of `steps` steps at `path`."""
    with RunFolder.create(path, "run: {}\n") as folder:
        SyntheticRun(folder).write(steps)
