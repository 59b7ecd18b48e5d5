"""The line files of a run folder, and the refusal of a used one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from controllers.events import EngineLaunched, RollingRestartStarted, VersionProven
from controllers.weight_versions import WeightVersion
from miles.telemetry.run_folder import RunFolder, read_lines


def test_it_is_made_with_its_config(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a" / "b", "run: {name: x}\n") as folder:
        assert (folder.path / "config.yaml").read_text() == "run: {name: x}\n"
        assert {file.name for file in folder.path.iterdir()} == {
            "config.yaml", "metrics.jsonl", "evals.jsonl", "events.jsonl",
        }  # fmt: skip


def test_an_empty_folder_is_taken_and_a_used_one_refused(tmp_path: Path) -> None:
    """Fails when `require_fresh` is not called by `create`."""
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", "").close()
    with pytest.raises(ConfigError, match=r"^run\.dir: must be a new or empty folder, got '.*empty'$"):
        RunFolder.create(tmp_path / "empty", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run\.dir: is not a folder"):
        RunFolder.create(tmp_path / "file", "")
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot be used"):
        RunFolder.create(tmp_path / "file" / "below", "")


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "") as folder:
        folder.append_metrics({"step": 1, "reward": 0.5, "kl": float("nan")})
        assert list(read_lines(folder.path / "metrics.jsonl")) == [{"step": 1, "reward": 0.5, "kl": None}]
        folder.append_eval({"step": 0, "reward": 0.25})
        assert list(read_lines(folder.path / "evals.jsonl")) == [{"step": 0, "reward": 0.25}]


def test_events_carry_time_name_engine_incarnation_and_the_rest(tmp_path: Path) -> None:
    version = WeightVersion(number=3, step=2, lineage=0, digest="00ff")
    with RunFolder.create(tmp_path / "run", "") as folder:
        folder.write_event(5.5, EngineLaunched("engine-0", "e0-1", url="http://127.0.0.1:1", pid=7, ranks=1))
        folder.write_event(6.5, VersionProven("engine-0", "e0-1", version))
        folder.write_event(7.5, RollingRestartStarted(("engine-0",), max_unavailable=1))
        lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert lines == [
        {"time": 5.5, "event": "EngineLaunched", "engine": "engine-0", "incarnation": "e0-1",
         "url": "http://127.0.0.1:1", "pid": 7, "ranks": 1},
        {"time": 6.5, "event": "VersionProven", "engine": "engine-0", "incarnation": "e0-1",
         "version": {"number": 3, "step": 2, "lineage": 0, "digest": "00ff"}},
        {"time": 7.5, "event": "RollingRestartStarted", "engine": None, "incarnation": None,
         "engines": ["engine-0"], "max_unavailable": 1},
    ]  # fmt: skip


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2')
    assert list(read_lines(file)) == [{"step": 1}]
    assert list(read_lines(tmp_path / "none.jsonl")) == []
