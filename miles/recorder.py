"""Hears everything a run does and writes it down: metrics, events, evaluations, progress, summary, curves.

Invariant: `summary.json` is written on every way out of a run, from the counters of the parts as they were at the end.
The run owns one; nothing reads back from it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from controllers.events import Event
from controllers.weight_versions import WeightVersion
from executors.rollout_executor import RolloutExecutor
from executors.trajectory import Batch
from miles.config import RunConfig
from miles.config.loader import dump_config
from miles.failure import describe_failure, is_stop
from miles.telemetry.logs import log_to
from miles.telemetry.progress import StepLine, make_progress
from miles.telemetry.run_folder import LOG_FILE, SUMMARY_FILE, RunFolder
from miles.telemetry.summary import GROUP_COUNTS, Status, SummaryBuilder, describe
from miles.trainer.protocol import StepStats

log = structlog.get_logger(__name__)


class RunRecorder:
    """A context manager around a whole run. Entering creates the run folder: ConfigError if that cannot be."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._folder = RunFolder.create(config.run.dir, dump_config(config))
        self._summary = SummaryBuilder(time.monotonic)
        self._progress = make_progress(config.telemetry.progress, config.run.name, config.train.steps)
        self._executor: RolloutExecutor | None = None
        self._stack = ExitStack()
        self._step: _OpenStep | None = None
        self._last_eval: float | None = None
        self._last_tokens = 0
        self._last_time = time.monotonic()

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    def __enter__(self) -> Self:
        self._stack.enter_context(self._folder)
        level = self._config.telemetry.log_level
        console = level if level == "debug" else "warning"
        self._stack.enter_context(log_to(self.path / LOG_FILE, level, console_level=console))
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error
        try:
            self._close_step()
            self._count_groups()
        except OSError as broken:  # a full disk: the summary must not say that all went well
            failure = error or broken
        summary = self._write_summary(failure)
        self._stack.__exit__(kind, error, trace)
        if self._config.telemetry.progress != "off":
            print(describe(summary, self.path), flush=True)
        if failure is not None and error is None:
            raise failure

    def _write_summary(self, failure: BaseException | None) -> dict[str, Any]:
        status: Status = "finished" if failure is None else "stopped" if is_stop(failure) else "failed"
        reason = describe_failure(failure) if failure is not None and status == "failed" else None
        if reason is not None:
            log.error("run_failed", exc_info=failure)
        summary = self._summary.write(self.path / SUMMARY_FILE, status, reason)
        if self._config.telemetry.plot and summary["steps"]:
            self._plot()
        return summary

    def watch(self, executor: RolloutExecutor) -> None:
        """Take the account of groups and the count of tokens from this executor from now on."""
        self._executor = executor

    def stage(self, text: str) -> None:
        """What the run is doing now."""
        log.info("stage", stage=text)
        self._progress.stage(text)

    def on_event(self, now: float, event: Event) -> None:
        """A sink of the controller's event bus; `now` in unix seconds."""
        self._folder.write_event(now, event)
        self._summary.add_event(event)
        self._progress.event(event)

    def happened(self, event: Event) -> None:
        """An event of a part that has no bus."""
        self.on_event(time.time(), event)

    def start_clock(self) -> None:
        """Seconds of steps and tokens per second count from here."""
        self._last_time = time.monotonic()
        self._last_tokens = self._tokens_generated()

    def step_done(
        self, batch: Batch, stats: StepStats, seconds: Mapping[str, float], *, publishes: bool = False
    ) -> None:
        """The step of a batch is done, or without a trainer the batch is made. `seconds` are those of its phases.

        With `publishes` its line waits for `published`, which follows.
        """
        self._close_step()
        self._step = _OpenStep(batch, stats, dict(seconds))
        if not publishes:
            self._close_step()

    def published(self, version: WeightVersion, publish_s: float, sync_s: float, pause_s: float) -> None:
        """The weights after the newest step are published.

        `sync_s` and `pause_s` are of the newest update of an engine that is over, usually to the version before.
        """
        if self._step is not None:
            self._step.weight_version = version.number
            self._step.seconds |= {"publish_s": publish_s, "last_sync_s": sync_s, "last_pause_s": pause_s}
            self._close_step()

    def evaluated(self, step: int, weight_version: int, reward: float, prompts: int, seconds: float) -> None:
        """A greedy evaluation is done."""
        self._last_eval = reward
        self._summary.add_eval(reward)
        line = {"step": step, "time": time.time(), "reward": reward, "weight_version": weight_version}
        self._folder.append_eval({**line, "prompts": prompts, "eval_s": seconds})

    def _close_step(self) -> None:
        """Write the line of the open step, if there is one."""
        if (open_step := self._step) is None:
            return
        self._step = None
        now = time.monotonic()
        tokens = self._tokens_generated()
        tokens_per_s = (tokens - self._last_tokens) / max(now - self._last_time, 1e-9)
        step_s, self._last_tokens, self._last_time = now - self._last_time, tokens, now
        metrics = dict(open_step.stats.metrics)
        reward, staleness = metrics.pop("reward", None), max(open_step.batch.staleness)
        self._folder.append_metrics(
            {
                "step": open_step.stats.step,
                "time": time.time(),
                "reward": reward,
                "tokens_per_s": tokens_per_s,
                "weight_version": open_step.weight_version,
                "staleness": staleness,
                "staleness_mean": sum(open_step.batch.staleness) / len(open_step.batch.staleness),
                **metrics,
                "step_s": step_s,
                **open_step.seconds,
            }
        )
        self._summary.add_step(open_step.stats.step, reward, staleness)
        version = open_step.weight_version or 0
        line = StepLine(open_step.stats.step, reward, tokens_per_s, version, staleness, self._last_eval, metrics)
        self._progress.step(line)

    def _tokens_generated(self) -> int:
        return 0 if self._executor is None else self._executor.statistics().tokens_generated

    def _count_groups(self) -> None:
        if self._executor is None:
            return
        account = self._executor.account
        counts = {name: getattr(account, name) for name in GROUP_COUNTS}
        self._summary.set_groups(counts, account.reasons, lost=account.lost, duplicated=account.duplicated)
        self._summary.set_tokens_generated(self._executor.statistics().tokens_generated)

    def _plot(self) -> None:
        from miles.telemetry.plot import plot_run

        try:
            plot_run(self.path)
        except Exception as error:
            log.error("plot_failed", exc_info=error)


class _OpenStep:
    """A step whose weights are not published yet."""

    def __init__(self, batch: Batch, stats: StepStats, seconds: dict[str, float]) -> None:
        self.batch, self.stats, self.seconds = batch, stats, seconds
        self.weight_version: int | None = None
