"""The command line of one engine incarnation, one small class per kind of engine.

A command is made by the launcher, pickled to the engine's host, and asked for its arguments once the host has a port.
A kind that is added here needs nothing else: everything after the start is SGLang's HTTP API.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class EngineCommand(Protocol):
    """Builds a command line. Pickles."""

    def argv(self, host: str, port: int) -> tuple[str, ...]:
        """The program and its arguments for a server that listens on host:port."""


@dataclass(frozen=True, slots=True)
class EmbeddedCommand:
    """The embedded engine: a process of this package, with dummy weights until the first sync."""

    model_path: Path
    weight_version: str
    max_running_requests: int
    random_seed: int
    weight_loader: str | None = None
    args: Mapping[str, object] = field(default_factory=dict)

    def argv(self, host: str, port: int) -> tuple[str, ...]:
        """`python -m miles.engines.embedded --model-path ...`"""
        own: dict[str, object] = {
            "model_path": self.model_path,
            "host": host,
            "port": port,
            "weight_version": self.weight_version,
            "load_format": "dummy",
            "max_running_requests": self.max_running_requests,
            "random_seed": self.random_seed,
            "custom_weight_loader": self.weight_loader,
        }
        return (sys.executable, "-m", "miles.engines.embedded", *flags({**own, **self.args}))


def flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """`{"max_tokens": 5, "verbose": True, "name": None}` -> `--max-tokens 5 --verbose`. A list gives several values."""
    words: list[str] = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        words.append(f"--{key.replace('_', '-')}")
        if isinstance(value, list | tuple):
            words.extend(str(item) for item in value)
        elif value is not True:
            words.append(str(value))
    return tuple(words)
