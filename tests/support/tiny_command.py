"""The command of tests/support/tiny_server.py, as an EngineCommand."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import tiny_server


@dataclass(frozen=True, slots=True)
class TinyCommand:
    weight_version: str
    mode: str = "serve"
    note: Path | None = None

    def argv(self, host: str, port: int) -> tuple[str, ...]:
        note = () if self.note is None else ("--note", str(self.note))
        return (
            *(sys.executable, "-I", "-S", tiny_server.__file__),
            *("--host", host, "--port", str(port)),
            *("--weight-version", self.weight_version, "--mode", self.mode),
            *note,
        )
