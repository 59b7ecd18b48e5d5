"""An embedded engine as a bare process, without Ray, for tests that share one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles.cluster.ports import reserve_port
from miles.engines.commands import EmbeddedCommand
from tests.support import recording_loader

CONTEXT_LENGTH = 4096
VOCAB_SIZE = 272
LABEL = "engine-0.1:none"
START_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pid: int


def write_slow_model(folder: Path) -> Path:
    """A model's config only (weights are dummies): some hundred tokens a second, and no token ends a sequence."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def embedded_command(folder: Path) -> EmbeddedCommand:
    """The command of an engine over `write_slow_model(folder)`, with the recording loader."""
    return EmbeddedCommand(write_slow_model(folder), LABEL, 8, 1, recording_loader.PATH)


@contextlib.contextmanager
def embedded_server(folder: Path) -> Iterator[RunningServer]:
    """Start one; it is up when it says so."""
    with running(embedded_command(folder)) as server:
        yield server


@contextlib.contextmanager
def running(command: EmbeddedCommand) -> Iterator[RunningServer]:
    """The same of any command."""
    with reserve_port("127.0.0.1") as reservation:
        argv = command.argv("127.0.0.1", reservation.port)
        assert argv[0] == sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
            late = threading.Timer(START_DEADLINE_S, process.kill)  # which ends its output, and the wait for a line
            try:
                late.start()
                assert process.stdout is not None
                for line in process.stdout:
                    if said := re.search(r"serves on (http://\S+)", line):
                        late.cancel()
                        yield RunningServer(said[1], process.pid)
                        break
                else:
                    raise AssertionError(f"the engine ended with code {process.wait()}")
            finally:
                late.cancel()
                process.kill()
