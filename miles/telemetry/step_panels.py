"""The small panels of `curves.png`: what the trainer said of its steps, one quantity each. Drawn where there is any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """`names` are those of `metrics.jsonl` (docs/metrics.md); the first is drawn in full, the others behind it."""

    title: str
    names: tuple[str, ...]
    from_zero: bool = False


PANELS = (
    Panel("response length (tokens)", ("response_length", "response_length_max"), from_zero=True),
    Panel("entropy (nats)", ("entropy",), from_zero=True),
    Panel("gradient norm", ("grad_norm",), from_zero=True),
    Panel("|logprob difference| to engines", ("logprob_diff_mean",), from_zero=True),
    Panel("clipped tokens (fraction)", ("clip_fraction", "clip_low", "clip_high"), from_zero=True),
    Panel("KL to the reference (nats)", ("kl",)),
    Panel("trained tokens per second", ("train_tokens_per_s",), from_zero=True),
    Panel("seconds of a step: all, waiting, training", ("step_s", "wait_s", "train_call_s"), from_zero=True),
)


def panels_of(metrics: Sequence[dict[str, Any]]) -> list[Panel]:
    """The panels that something can be drawn in."""
    present = {name for line in metrics for name, value in line.items() if value is not None}
    return [panel for panel in PANELS if panel.names[0] in present]


def draw_panel(axes: Axes, panel: Panel, metrics: Sequence[dict[str, Any]]) -> None:
    """Draw one quantity over the steps."""
    steps = [line["step"] for line in metrics]
    colours = ("#2c7fb8", "#d95f02", "#7570b3")
    for order, (name, colour) in enumerate(zip(panel.names, colours, strict=False)):
        values = [math.nan if line.get(name) is None else line[name] for line in metrics]
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.6 if order else 1.0, zorder=3 - order)
    axes.set_title(panel.title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
