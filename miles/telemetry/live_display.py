"""The live display on a terminal, drawn with rich. Log lines on standard error appear above it while it is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controllers.events import Event
from miles.telemetry.progress import Eta, FleetView, StepLine, clock_text

_STATE_STYLES = {
    "Serving": "green",
    "Updating": "cyan",
    "Syncing": "blue",
    "Launching": "yellow",
    "Draining": "magenta",
    "Failed": "bold red",
    "Stopped": "dim",
}
_FIGURES = (
    ("response_length", "length"),
    ("entropy", "entropy"),
    ("kl", "KL"),
    ("grad_norm", "gradient"),
    ("logprob_diff_mean", "logprob difference"),
)
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


class LiveDisplay:
    """A Progress that keeps a few lines of the terminal up to date."""

    def __init__(
        self, name: str, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._total = total_steps
        self._fleet = FleetView()
        self._eta = Eta(total_steps, clock)
        self._stage = "starting"
        self._last: StepLine | None = None
        self._left: float | None = None
        self._rewards: list[float] = []
        self._live = Live(console=Console(file=stream), auto_refresh=False, redirect_stdout=True, redirect_stderr=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def stage(self, text: str) -> None:
        self._stage = text
        self._draw()

    def event(self, event: Event) -> None:
        self._fleet.apply(event)
        self._draw()

    def step(self, line: StepLine) -> None:
        self._last = line
        self._left = self._eta.after(line.step)
        if line.reward is not None:
            self._rewards.append(line.reward)
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        step = self._last.step if self._last else 0
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=self._total, completed=step, width=36),
            f"step {step}/{self._total}",
            f"left {clock_text(self._left)}",
            Text(self._stage, style="dim"),
        )
        return Group(head, self._figures(), self._engines())

    def _figures(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        line = self._last
        if line is None:
            return table
        reward = "none" if line.reward is None else f"{line.reward:.3f}"
        table.add_row("reward", Text(reward, style="bold"), Text(_sparkline(self._rewards), style="green"))
        evaluation = "" if line.eval is None else f"greedy eval {line.eval:.3f}"
        table.add_row("tokens/s", f"{line.tokens_per_s:,.0f}", evaluation)
        table.add_row("weights", f"v{line.weight_version}", f"staleness {line.staleness}")
        shown = [f"{label} {line.figures[name]:.3g}" for name, label in _FIGURES if name in line.figures]
        return Group(table, Text("trainer   " + "   ".join(shown))) if shown else table

    def _engines(self) -> RenderableType:
        text = Text("engines  ")
        for engine, state, version in self._fleet.engines():
            serving = f" v{version}" if version is not None else ""
            text.append(f"{engine} ")
            text.append(f"{state}{serving}", style=_STATE_STYLES.get(state, ""))
            text.append("   ")
        return text


def _sparkline(values: list[float]) -> str:
    """The whole course of `values` in at most _SPARK_WIDTH characters, each the mean of its share."""
    if not values:
        return ""
    width = min(_SPARK_WIDTH, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
