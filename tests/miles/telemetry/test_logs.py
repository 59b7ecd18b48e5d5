"""JSON lines in a file, readable lines on standard error, and everything back as it was afterwards."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from miles.telemetry.logs import log_to


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_events_go_to_file_and_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to(tmp_path / "log.jsonl"):
        structlog.get_logger("miles.x").info("engine launched", engine="engine-0", path=Path("a"))
        structlog.get_logger("miles.x").debug("too fine")
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["event"], line["engine"], line["level"], line["logger"]) == (
        "engine launched", "engine-0", "info", "miles.x",
    )  # fmt: skip
    shown = capsys.readouterr()
    assert "engine launched" in shown.err
    assert shown.out == ""


def test_the_console_may_be_quieter_than_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to(tmp_path / "log.jsonl", level="debug", console_level="warning"):
        structlog.get_logger("a").debug("fine")
        structlog.get_logger("a").warning("coarse")
    assert [line["event"] for line in lines(tmp_path / "log.jsonl")] == ["fine", "coarse"]
    assert "fine" not in capsys.readouterr().err


def test_an_exception_is_in_the_file_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to(tmp_path / "log.jsonl"):
        try:
            raise ValueError("torn")
        except ValueError:
            structlog.get_logger("a").exception("step failed")
    (line,) = lines(tmp_path / "log.jsonl")
    assert "ValueError: torn" in str(line["exception"])
    shown = capsys.readouterr().err
    assert "step failed" in shown
    assert "Traceback" not in shown


def test_warnings_of_the_standard_library_join(tmp_path: Path) -> None:
    with log_to(tmp_path / "log.jsonl"):
        logging.getLogger("asyncio").warning("task %s was slow", "t1")
        logging.getLogger("asyncio").info("nothing")
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["event"], line["level"], line["logger"]) == ("task t1 was slow", "warning", "asyncio")


def test_the_configuration_before_comes_back(tmp_path: Path) -> None:
    handlers = list(logging.getLogger().handlers)
    before = structlog.get_config()
    with log_to(tmp_path / "log.jsonl"):
        assert structlog.get_config()["processors"] != before["processors"]
    assert structlog.get_config() == before
    assert logging.getLogger().handlers == handlers
