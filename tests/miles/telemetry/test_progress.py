"""Plain lines and the live display, as text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from controllers.events import EngineStateChanged, VersionPublished
from controllers.weight_versions import WeightVersion
from miles.telemetry.live_display import LiveDisplay
from miles.telemetry.progress import Eta, PlainLines, ProgressMode, StepLine, make_progress


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def serving(engine: str, version: int) -> EngineStateChanged:
    return EngineStateChanged(engine, f"{engine}.1", "Serving", "Syncing", None, version)


def step(number: int, reward: float | None = 0.5) -> StepLine:
    return StepLine(number, reward, tokens_per_s=3210.4, weight_version=number + 1, staleness=1, eval=0.25)


def test_a_plain_line_says_everything() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainLines(10, out, clock) as progress:
        progress.event(serving("engine-0", 1))
        progress.event(serving("engine-1", 1))
        progress.step(step(1))
        clock.now = 60.0
        progress.step(step(5))
    assert out.getvalue().splitlines() == [
        "step 1/10  reward 0.500  eval 0.250  3,210 tokens/s  weights v2  staleness 1  engines: 2 Serving  left -:--",
        "step 5/10  reward 0.500  eval 0.250  3,210 tokens/s  weights v6  staleness 1  engines: 2 Serving  left 1:15",
    ]


def test_plain_lines_are_spaced_in_time_and_the_last_step_is_never_left_out() -> None:
    """Fails when the interval, or the exception for the last step, is removed from PlainLines.step."""
    out, clock = io.StringIO(), Clock()
    with PlainLines(10, out, clock) as progress:
        for number in range(1, 11):
            clock.now = float(number)
            progress.step(step(number, reward=None))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/10", "6/10", "10/10"]


def test_plain_lines_tell_of_engines_that_go() -> None:
    out = io.StringIO()
    with PlainLines(10, out, Clock()) as progress:
        progress.event(serving("engine-0", 1))
        progress.event(EngineStateChanged("engine-1", "b", "Failed", "Serving", "exit code -9"))
    assert out.getvalue() == "engine-1 failed (exit code -9); engines: 1 Failed, 1 Serving\n"


def test_the_live_display_shows_engines_reward_and_versions() -> None:
    out = Terminal()
    with LiveDisplay("sort", 10, out, Clock()) as progress:
        progress.stage("training")
        progress.event(serving("engine-0", 4))
        progress.event(EngineStateChanged("engine-1", "b", "Draining", "Serving"))
        progress.event(VersionPublished(WeightVersion(4, 3, 0, "aa")))
        progress.step(step(3))
    shown = out.getvalue()
    for part in ("sort", "step 3/10", "training", "engine-0", "Serving v4", "Draining", "0.500", "3,210", "v4"):
        assert part in shown


def test_the_live_display_has_a_line_of_the_trainers_numbers_where_there_are_any() -> None:
    out = Terminal()
    with LiveDisplay("sort", 10, out, Clock()) as progress:
        progress.step(step(3))
        assert "trainer" not in out.getvalue()
        progress.step(replace(step(4), figures={"entropy": 0.51234, "grad_norm": 12.0, "lr": 1.0}))
    assert "trainer   entropy 0.512   gradient 12" in out.getvalue() and "lr" not in out.getvalue()


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [("auto", Terminal(), "LiveDisplay"), ("auto", io.StringIO(), "PlainLines"), ("live", io.StringIO(), "LiveDisplay"),
     ("plain", Terminal(), "PlainLines"), ("off", Terminal(), "_Silent")],
)  # fmt: skip
def test_the_mode_picks_the_display(mode: ProgressMode, stream: io.StringIO, kind: str) -> None:
    assert type(make_progress(mode, "run", 10, stream)).__name__ == kind


def test_time_left_is_unknown_at_first_and_then_follows_the_mean() -> None:
    clock = Clock()
    eta = Eta(10, clock)
    assert eta.after(1) is None
    clock.now = 4.0
    assert eta.after(3) == 14.0
    clock.now = 18.0
    assert eta.after(10) == 0.0
