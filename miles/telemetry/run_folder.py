"""The files of a run while it runs: resolved config, metrics, evaluations and events, one JSON object a line.

Every line is one unbuffered append, so that a killed driver leaves whole lines. A folder is used by one run only:
`RunFolder.create` refuses one that holds anything. The recorder of a run owns the object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from controllers.errors import ConfigError
from controllers.events import Event

CONFIG_FILE = "config.yaml"
MODEL_FOLDER = "model"
METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "log.jsonl"
SUMMARY_FILE = "summary.json"
CURVES_FILE = "curves.png"


class RunFolder:
    """Writes the line files. A context manager; closing is idempotent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = (path / METRICS_FILE).open("ab", buffering=0)
        self._evals = (path / EVALS_FILE).open("ab", buffering=0)
        self._events = (path / EVENTS_FILE).open("ab", buffering=0)

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> Self:
        """Make the folder (parents too), write `config.yaml`, and open the line files.

        Raises ConfigError when `path` is not a folder, is not empty or cannot be written.
        """
        require_fresh(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG_FILE).write_text(config_yaml, encoding="utf-8")
            return cls(path)
        except OSError as error:
            problem = f"run.dir: cannot be used ({error.strerror}), got {str(path)!r}"
            raise ConfigError(problem, key="run.dir") from error

    def append_metrics(self, metrics: Mapping[str, object]) -> None:
        """Append the line of one training step. NaN and infinities become null."""
        self._metrics.write(_line(dict(metrics)))

    def append_eval(self, evaluation: Mapping[str, object]) -> None:
        """Append one evaluation: `step`, `time`, `reward` and what else is known of it."""
        self._evals.write(_line(dict(evaluation)))

    def write_event(self, time: float, event: Event) -> None:
        """Append a controller event. `time` is in unix seconds; see `event_record`."""
        self._events.write(_line(event_record(time, event)))

    def close(self) -> None:
        """Close the files; what comes later raises."""
        for file in (self._metrics, self._evals, self._events):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_fresh(path: Path) -> None:
    """Raise ConfigError unless `path` is absent or an empty folder."""
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"run.dir: must be a new or empty folder, got {str(path)!r}", key="run.dir")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir: is not a folder, got {str(path)!r}", key="run.dir")


def event_record(time: float, event: Event) -> dict[str, object]:
    """The content of an event's line: `time`, its class name as `event`, `engine`, `incarnation`, its other fields.

    `engine` and `incarnation` are null for an event about the whole fleet.
    """
    record: dict[str, object] = {"time": time, "event": type(event).__name__, "engine": None, "incarnation": None}
    record.update((field.name, getattr(event, field.name)) for field in fields(event))
    return record


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a line file; none if it does not exist. A last line that was cut short is left out.

    Raises ConfigError for any other line that is not JSON.
    """
    if not file.exists():
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ConfigError(f"{file}, line {number}: not JSON ({error})", path=str(file)) from error


def _line(record: dict[str, object]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY, default=str)
