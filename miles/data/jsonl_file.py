"""Reads a file of one JSON object a line into rows of prompt, label and whatever else stands there.

A wrong key is a fault of the file and ends the run before it starts; a line that is broken in itself is reported with
its number and left out. `miles.data.jsonl` makes prompts of the rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from controllers.errors import ConfigError
from miles.registry import did_you_mean

log = logging.getLogger(__name__)  # structlog joins it in a run; loading that here would slow `miles check`

_REPORTED_LINES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `extra` holds its other fields, which go to the reward function."""

    prompt: str
    label: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """Where rows are and how their fields are called. `path_key` is the configuration key that names the file."""

    path: Path
    prompt_key: str
    label_key: str
    path_key: str = "data.path"

    def read(self) -> list[Row]:
        """All valid rows, in order.

        Raises ConfigError for a file that cannot be read, a line without one of the two keys, or no valid line.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise self._fault(f"cannot read {str(self.path)!r} ({error.strerror})") from error
        rows: list[Row] = []
        broken: list[str] = []
        # Not str.splitlines: that also splits inside a JSON string, at U+2028 for one.
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                try:
                    rows.append(self._row(number, line))
                except ValueError as problem:
                    broken.append(f"line {number}: {problem}")
        if not rows:
            detail = f": {broken[0]}" if broken else ", it is empty"
            raise self._fault(f"{str(self.path)!r} has no valid row{detail}")
        if broken:
            first = "; ".join(broken[:_REPORTED_LINES])
            log.warning("%s: %d broken rows are left out: %s", self.path, len(broken), first)
        return rows

    def _row(self, number: int, line: bytes) -> Row:
        """Raises ValueError for a line that is broken in itself."""
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise ValueError(f"a JSON object is wanted, not {_shown(row)}")
        for setting, key in (("data.prompt_key", self.prompt_key), ("data.label_key", self.label_key)):
            if key not in row:
                place = f"{str(self.path)!r}, line {number}"
                raise ConfigError(f"{setting}: no {key!r} in {place}{did_you_mean(key, row)}", key=setting)
        prompt = row.pop(self.prompt_key)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{self.prompt_key!r} must be a text that is not empty, not {_shown(prompt)}")
        label = row.pop(self.label_key, prompt)  # one field may serve as both
        if isinstance(label, bool) or not isinstance(label, (str, int, float)):
            raise ValueError(f"{self.label_key!r} must be a text or a number, not {_shown(label)}")
        return Row(prompt, str(label), row)

    def _fault(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path_key}: {problem}", key=self.path_key)


def _shown(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 40 else f"{text[:37]}..."
