"""What a person sees while a run runs: a live display on a terminal, plain lines elsewhere.

The recorder calls `stage`, `event` and `step`; nothing here is read back. The display draws only when called, so it
needs no thread of its own.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from controllers.events import EngineStateChanged, Event, TrainerLost, TrainerRebuilt, VersionPublished

ProgressMode = Literal["auto", "live", "plain", "off"]

_PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class StepLine:
    """One finished step. `reward` is None when no sample could be scored; `eval` is that of the newest evaluation."""

    step: int
    reward: float | None
    tokens_per_s: float
    weight_version: int
    staleness: int
    eval: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of it, by the names of docs/metrics.md."""


class Progress(Protocol):
    """A context manager that is told what happens."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stage(self, text: str) -> None:
        """What the run is doing now: `starting 2 engines`, `warm-up 10/45`, `training`."""

    def step(self, line: StepLine) -> None:
        """A training step is done."""

    def event(self, event: Event) -> None:
        """A controller event."""


def make_progress(mode: ProgressMode, name: str, total_steps: int, stream: TextIO | None = None) -> Progress:
    """The display that `mode` asks for; `auto` is live if `stream` (standard output) is a terminal."""
    out = stream or sys.stdout
    if mode == "off":
        return _Silent()
    if mode == "live" or (mode == "auto" and out.isatty()):
        from miles.telemetry.live_display import LiveDisplay

        return LiveDisplay(name, total_steps, out)
    return PlainLines(total_steps, out)


class FleetView:
    """The last known state of every engine, from events."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._versions: dict[str, int | None] = {}
        self.published = 0

    def apply(self, event: Event) -> None:
        """Take over what an event says."""
        if isinstance(event, EngineStateChanged):
            self._states[event.engine] = event.state
            self._versions[event.engine] = event.version
        elif isinstance(event, VersionPublished):
            self.published = event.version.number

    def engines(self) -> list[tuple[str, str, int | None]]:
        """(engine, state, serving version or None), by name."""
        return [(engine, state, self._versions[engine]) for engine, state in sorted(self._states.items())]

    def by_state(self) -> str:
        """`2 Serving` or `1 Launching, 1 Serving`."""
        counts = Counter(self._states.values())
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


class Eta:
    """Seconds left, from the mean time of the steps so far."""

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> float | None:
        """Seconds left after `step`, None before there are two steps to go by."""
        if self._first is None:
            self._first = (step, self._clock())
            return None
        first_step, first_time = self._first
        if step <= first_step:
            return None
        return (self._clock() - first_time) / (step - first_step) * max(0, self._total - step)


def clock_text(seconds: float | None) -> str:
    """`1:05`, or `-:--` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class PlainLines:
    """One line a stage, one a change of an engine that matters, and one a step, at most every few seconds."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._fleet = FleetView()
        self._eta = Eta(total_steps, clock)
        self._last_print: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def stage(self, text: str) -> None:
        self._print(text)

    def event(self, event: Event) -> None:
        self._fleet.apply(event)
        if isinstance(event, EngineStateChanged) and event.state in ("Launching", "Draining", "Failed", "Stopped"):
            reason = f" ({event.reason})" if event.reason else ""
            self._print(f"{event.engine} {event.state.lower()}{reason}; engines: {self._fleet.by_state()}")
        elif isinstance(event, TrainerLost):
            self._print(f"trainer lost after step {event.step} ({event.reason}); engines go on")
        elif isinstance(event, TrainerRebuilt):
            self._print(f"trainer back at step {event.step}, {event.rebuild_s:.0f} s later")

    def step(self, line: StepLine) -> None:
        left = self._eta.after(line.step)
        now = self._clock()
        due = self._last_print is None or now - self._last_print >= _PLAIN_INTERVAL_S or line.step == self._total
        if not due:
            return
        self._last_print = now
        reward = "none" if line.reward is None else f"{line.reward:.3f}"
        evaluation = "" if line.eval is None else f"  eval {line.eval:.3f}"
        self._print(
            f"step {line.step}/{self._total}  reward {reward}{evaluation}  {line.tokens_per_s:,.0f} tokens/s"
            f"  weights v{line.weight_version}  staleness {line.staleness}"
            f"  engines: {self._fleet.by_state()}  left {clock_text(left)}"
        )

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def step(self, line: StepLine) -> None:
        pass

    def event(self, event: Event) -> None:
        pass
