"""`miles train`: everything that can be refused is refused before the heavy imports, then the training loop runs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

from controllers.errors import ConfigError
from miles.cluster.signals import interruptible
from miles.config import check_ports, load_config
from miles.telemetry.logs import log_to_console
from miles.telemetry.run_folder import require_fresh


def train_command(config_file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run a training run to its end; the run itself prints what it came to. Returns the exit code."""
    with interruptible():
        log_to_console()
        if resume:
            raise ConfigError("--resume is not built yet; start a new run with run.dir=...", argument="--resume")
        config = load_config(config_file, overrides)
        require_fresh(config.run.dir)
        check_ports(config)

        from miles.train_loop import run_training

        gc.enable()
        return run_training(config)
