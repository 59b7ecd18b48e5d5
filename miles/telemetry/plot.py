"""`curves.png`: reward and greedy eval, staleness, the trainer's numbers, and over time the engines' states and lag.

Drawn from the files of a run folder alone, so that it works on a run that is going on, was stopped or was killed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controllers.errors import ConfigError
from miles.telemetry.fleet_history import FleetHistory, read_history
from miles.telemetry.run_folder import CURVES_FILE, EVALS_FILE, EVENTS_FILE, METRICS_FILE, read_lines
from miles.telemetry.step_panels import COLUMNS, draw_panel, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_COLOURS = {
    "Serving": "#4daf6a",
    "Updating": "#2c7fb8",
    "Syncing": "#9ecae1",
    "Launching": "#f2c14e",
    "Draining": "#b07cc6",
    "Failed": "#d7301f",
    "Stopped": "#bdbdbd",
}
_ENGINE_COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666")
_MIN_BAR_FRACTION = 1 / 1200
_LAG_BINS = 160


def plot_run(folder: Path) -> Path:
    """Draw `curves.png` into a run folder and return its path.

    Raises ConfigError when the folder has neither metrics nor events.
    """
    if not folder.is_dir():
        raise ConfigError(f"run folder {str(folder)!r} does not exist", path=str(folder))
    metrics = list(read_lines(folder / METRICS_FILE))
    evals = list(read_lines(folder / EVALS_FILE))
    history = read_history(read_lines(folder / EVENTS_FILE))
    if not metrics and not history.spans:
        raise ConfigError(f"{str(folder)!r} holds no metrics and no events, so it is no run folder", path=str(folder))

    # A figure and canvas of its own, so that no global state or window system of pyplot is involved.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, panels = max(1, len(history.engines)), panels_of(metrics)
    panel_rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(11, 8.6 + 0.35 * rows + 1.7 * panel_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(folder, metrics), fontsize=13)
    grid = figure.add_gridspec(5, 1, height_ratios=(4.2, 1.5, 1.8 * panel_rows or 0.01, 0.9 + 0.45 * rows, 1.7))
    reward_axes = figure.add_subplot(grid[0])
    staleness_axes = figure.add_subplot(grid[1], sharex=reward_axes)
    states_axes = figure.add_subplot(grid[3])
    lag_axes = figure.add_subplot(grid[4], sharex=states_axes)
    _draw_reward(reward_axes, metrics, evals)
    _draw_staleness(staleness_axes, metrics)
    if panels:
        small = grid[2].subgridspec(panel_rows, COLUMNS)
        for index, panel in enumerate(panels):
            draw_panel(figure.add_subplot(small[divmod(index, COLUMNS)]), panel, metrics)
    _draw_states(states_axes, history)
    _draw_lag(lag_axes, history)
    target = folder / CURVES_FILE
    partial = folder / f"{CURVES_FILE}.partial"
    figure.savefig(partial, dpi=110, format="png")
    partial.replace(target)
    return target


def _title(folder: Path, metrics: Sequence[dict[str, Any]]) -> str:
    steps = metrics[-1]["step"] if metrics else 0
    return f"{folder.name}: {steps} steps"


def _draw_reward(axes: Axes, metrics: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
    scored = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    steps, rewards = [step for step, _ in scored], [reward for _, reward in scored]
    axes.plot(steps, rewards, color="#2c7fb8", alpha=0.3, linewidth=0.8, label="reward of each step")
    axes.plot(steps, _smooth(rewards), color="#2c7fb8", linewidth=2, label="reward, smoothed")
    axes.plot(
        [line["step"] for line in evals],
        [line["reward"] for line in evals],
        color="#d95f02",
        marker="o",
        markersize=4,
        linewidth=1.2,
        label="greedy eval on held-out prompts",
    )
    values = [*rewards, *(line["reward"] for line in evals)]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("reward")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=9)


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the steps before, a twentieth of all of them, at least 5."""
    window = max(5, len(values) // 20)
    means: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _draw_staleness(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    steps = [line["step"] for line in metrics]
    values = [line.get("staleness") or 0 for line in metrics]
    axes.plot(steps, values, color="#7570b3", linewidth=0.9, drawstyle="steps-mid")
    axes.set_ylim(-0.2, max(values, default=0) + 0.4)
    axes.set_yticks(range(math.ceil(max(values, default=0)) + 1))
    axes.set_ylabel("staleness\n(steps)")
    axes.set_xlabel("training step")
    axes.grid(alpha=0.25)


def _draw_states(axes: Axes, history: FleetHistory) -> None:
    from matplotlib.patches import Patch

    # A pause takes milliseconds of minutes and there are hundreds: pauses get a strip of their own below the bar of
    # the serving engine, and every bar a width that can be seen. A crash is over in no time, so it gets a mark.
    least = history.end * _MIN_BAR_FRACTION
    rows = {engine: row for row, engine in enumerate(history.engines)}
    for engine, row in rows.items():
        for state, colour in STATE_COLOURS.items():
            spans = [span for span in history.spans if (span.engine, span.state) == (engine, state)]
            bars = [(span.start, max(span.end - span.start, least)) for span in spans]
            if state == "Updating":
                axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=STATE_COLOURS["Serving"], zorder=1)
                axes.broken_barh(bars, (row + 0.2, 0.15), facecolors=colour, zorder=3, snap=False)
            else:
                axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour, zorder=2)
            if state == "Failed":
                starts = [span.start for span in spans]
                axes.scatter(starts, [row] * len(starts), s=80, marker="X", color=colour, edgecolor="white", zorder=4)
    for start, end in history.restarts:
        axes.axvspan(start, end, color="black", alpha=0.08, linewidth=0, zorder=0)
    axes.set_ylim(-0.5, max(rows.values(), default=0) + 0.5)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, history.end or 1)
    axes.set_xlabel("seconds since the start")
    seen = {span.state for span in history.spans}
    handles = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items() if state in seen]
    if history.restarts:
        handles.append(Patch(color="black", alpha=0.08, label="rolling restart"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=8, fontsize=9, frameon=False)


def _draw_lag(axes: Axes, history: FleetHistory) -> None:
    edges = [history.end * index / _LAG_BINS for index in range(_LAG_BINS + 1)]
    highest = 0.0
    for row, engine in enumerate(history.engines):
        means = history.mean_lag(engine, edges)
        highest = max(highest, *(mean for mean in means if mean is not None), 0.0)
        axes.plot(
            edges[:-1],
            [math.nan if mean is None else mean for mean in means],
            color=_ENGINE_COLOURS[row % len(_ENGINE_COLOURS)],
            drawstyle="steps-post",
            linewidth=1.2,
            label=engine,
        )
    axes.set_ylim(-0.05 * max(highest, 1), 1.3 * max(highest, 0.1))
    axes.set_ylabel("versions\nbehind (mean)")
    axes.set_xlabel("seconds since the start")
    axes.grid(alpha=0.25)
    if 0 < len(history.engines) <= len(_ENGINE_COLOURS):
        axes.legend(loc="upper right", fontsize=9, ncols=4)
