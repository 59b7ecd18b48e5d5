"""Replaying events into spans and lag, and a picture that is drawn."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from miles.telemetry.fleet_history import StateSpan, read_history
from miles.telemetry.plot import plot_run
from miles.telemetry.run_folder import RunFolder
from miles.telemetry.step_panels import panels_of
from tests.miles.telemetry.synthetic_run import write_synthetic_run


def change(time: float, engine: str, state: str, version: int | None = None) -> dict[str, Any]:
    return {"time": time, "event": "EngineStateChanged", "engine": engine, "state": state, "version": version}


def published(time: float, number: int) -> dict[str, Any]:
    return {"time": time, "event": "VersionPublished", "engine": None, "version": {"number": number}}


def test_states_become_spans_that_join() -> None:
    history = read_history(
        [change(10, "a", "Launching"), change(12, "a", "Syncing"), change(13, "a", "Serving", 1), published(20, 1)]
    )
    assert history.spans == [
        StateSpan("a", "Launching", 0, 2),
        StateSpan("a", "Syncing", 2, 3),
        StateSpan("a", "Serving", 3, 10),
    ]


def test_lag_is_published_minus_served_and_unknown_while_not_serving() -> None:
    history = read_history(
        [
            published(0, 1),
            change(1, "a", "Serving", 1),
            published(2, 2),
            change(3, "a", "Updating", 1),
            change(4, "a", "Serving", 2),
            change(5, "a", "Failed"),
            published(6, 3),
        ]
    )
    assert history.lag["a"] == [(1, 0), (2, 1), (3, 1), (4, 0), (5, None), (6, None)]
    assert history.mean_lag("a", [0, 2, 4, 5, 6]) == [0, 1, 0, None]


def test_a_bin_half_served_counts_only_what_was_served() -> None:
    history = read_history([published(0, 1), change(1, "a", "Serving", 1), published(3, 2), published(4, 2)])
    assert history.mean_lag("a", [0, 4]) == [pytest.approx(1 / 3)]


def test_the_picture_of_a_run(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=12)
    picture = plot_run(tmp_path / "run")
    content = picture.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG")
    assert width > 1000
    assert height > 800
    assert not (tmp_path / "run" / "curves.png.partial").exists()


def test_a_panel_is_drawn_only_of_what_there_is() -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "entropy": None}, {"step": 2, "entropy": 0.5, "kl": None}]
    assert [panel.names[0] for panel in panels_of(lines)] == ["entropy"]


def test_a_run_that_never_trained_has_a_picture_too(tmp_path: Path) -> None:
    from controllers.events import EngineStateChanged

    with RunFolder.create(tmp_path / "run", "") as folder:
        folder.write_event(1.0, EngineStateChanged("engine-0", "a", "Launching", None))
    assert plot_run(tmp_path / "run").exists()


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        plot_run(tmp_path / "no")
    with pytest.raises(ConfigError, match="no run folder"):
        plot_run(tmp_path)
