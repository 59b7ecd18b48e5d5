"""`summary.json`: what a run came to. Built from what the recorder hears, written on every way out of a run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from controllers.events import EngineRestarted, Event, TrainerRebuilt, VersionPublished

Status = Literal["finished", "stopped", "failed"]

GROUP_COUNTS = ("dispatched", "trained", "filtered", "dropped", "failed", "buffered", "in_flight")


class SummaryBuilder:
    """Collects the figures of `summary.json`. `clock` gives seconds and starts to count when it is constructed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._steps = 0
        self._rewards: list[float] = []
        self._evals: list[float] = []
        self._staleness_max = 0
        self._version = 0
        self._publications = 0
        self._restarts = 0
        self._trainer_restarts = 0
        self._tokens = 0
        self._groups = dict.fromkeys(GROUP_COUNTS, 0)
        self._reasons: dict[str, dict[str, int]] = {}
        self._lost = 0
        self._duplicated = 0

    def add_step(self, step: int, reward: float | None, staleness: int) -> None:
        """Count a training step; `reward` is its mean, None when no sample could be scored."""
        self._steps = step
        self._staleness_max = max(self._staleness_max, staleness)
        if reward is not None:
            self._rewards.append(reward)

    def add_eval(self, reward: float) -> None:
        """Count an evaluation."""
        self._evals.append(reward)

    def add_event(self, event: Event) -> None:
        """Count publications and restarts; other events are ignored."""
        if isinstance(event, VersionPublished):
            self._publications += 1
            self._version = event.version.number
        elif isinstance(event, EngineRestarted):
            self._restarts += 1
        elif isinstance(event, TrainerRebuilt):
            self._trainer_restarts += 1

    def set_tokens_generated(self, tokens: int) -> None:
        """Tokens that engines generated for this run and that were received."""
        self._tokens = tokens

    def set_groups(
        self,
        counts: Mapping[str, int],
        reasons: Mapping[str, Mapping[str, int]],
        *,
        lost: int,
        duplicated: int,
    ) -> None:
        """Set the account of training groups: `counts` by the names in GROUP_COUNTS, `reasons` by outcome."""
        self._groups = {name: counts.get(name, 0) for name in GROUP_COUNTS}
        self._reasons = {outcome: dict(counted) for outcome, counted in reasons.items() if counted}
        self._lost = lost
        self._duplicated = duplicated

    def build(self, status: Status, error: str | None = None) -> dict[str, Any]:
        """The content of `summary.json`. `error` is given when `status` is `failed`."""
        summary: dict[str, Any] = {
            "status": status,
            "steps": self._steps,
            "wall_s": round(self._clock() - self._started, 3),
            "tokens_generated": self._tokens,
            "reward": _first_and_last_tenth(self._rewards),
            "eval": _first_and_last(self._evals),
            "weight_version": self._version,
            "weight_syncs": self._publications,
            "engine_restarts": self._restarts,
            "trainer_restarts": self._trainer_restarts,
            "staleness_max": self._staleness_max,
            "groups": self._groups,
            "group_reasons": self._reasons,
            "lost": self._lost,
            "duplicated": self._duplicated,
        }
        if error is not None:
            summary["error"] = error
        return summary

    def write(self, file: Path, status: Status, error: str | None = None) -> dict[str, Any]:
        """Write `build(...)` to `file`, which is never seen half written, and return it."""
        summary = self.build(status, error)
        partial = file.with_name(file.name + ".partial")
        partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        os.replace(partial, file)
        return summary


def _first_and_last_tenth(values: Sequence[float]) -> dict[str, float | None]:
    """Means over the first and the last tenth, of at least one value each; null where there is none."""
    if not values:
        return {"first": None, "last": None}
    tenth = max(1, len(values) // 10)
    return {"first": round(statistics.fmean(values[:tenth]), 6), "last": round(statistics.fmean(values[-tenth:]), 6)}


def _first_and_last(values: Sequence[float]) -> dict[str, float | None]:
    return {"first": values[0], "last": values[-1]} if values else {"first": None, "last": None}


def describe(summary: Mapping[str, Any], folder: Path) -> str:
    """A few lines for a person: what was learned, what happened to the fleet, where the files are."""
    reward, evaluation, groups = summary["reward"], summary["eval"], summary["groups"]
    lines = [f"{summary['status']} after {summary['steps']} steps in {_duration(summary['wall_s'])}"]
    if summary.get("error"):
        lines.append(f"  error       {summary['error']}")
    lines += [
        f"  reward      {_number(reward['first'])} -> {_number(reward['last'])}",
        f"  greedy eval {_number(evaluation['first'])} -> {_number(evaluation['last'])}",
        f"  weights     version {summary['weight_version']}, {summary['weight_syncs']} syncs,"
        f" staleness at most {summary['staleness_max']}",
        f"  engines     {summary['engine_restarts']} restarts",
        *([f"  trainer     {summary['trainer_restarts']} restarts"] if summary["trainer_restarts"] else []),
        f"  groups      {groups['trained']} trained of {groups['dispatched']},"
        f" {summary['lost']} lost, {summary['duplicated']} duplicated",
        f"  files       {folder}",
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
