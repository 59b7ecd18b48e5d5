"""What the trainer's driver does when ranks are lost or a step goes bad, as one frozen value. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from controllers.errors import ConfigError, MilesError

BadStepPolicy = Literal["skip", "stop"]


class BadStep(MilesError):
    """Training stopped at a step without an update (`step`); its batch is in `file`."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Raises ConfigError for values that cannot work."""

    rebuilds: int = 3
    """How often the rank group may be rebuilt; the next loss after that fails the run."""
    folder: Path | None = None
    """Where batches are kept: `batches/` until a checkpoint covers them, `bad_batches/` for study. Without it no batch
    is kept, and a rebuild works only as long as nothing was trained since the last checkpoint."""
    keep_batches: bool = False
    """Keep what `batches/` holds also after a checkpoint."""
    bad_steps: BadStepPolicy = "skip"
    """A step whose update was left out, for its loss or gradient: go on with the next one, or stop."""
    max_bad_steps_in_a_row: int = 5
    """So many of them one after the other stop training also under `skip`."""

    def __post_init__(self) -> None:
        if self.rebuilds < 0:
            raise ConfigError(f"trainer.rebuilds must be 0 or more, not {self.rebuilds}", key="trainer.rebuilds")
        if self.max_bad_steps_in_a_row < 1:
            key = "trainer.max_bad_steps_in_a_row"
            raise ConfigError(f"{key} must be 1 or more, not {self.max_bad_steps_in_a_row}", key=key)
        if self.bad_steps not in ("skip", "stop"):
            raise ConfigError(
                f"trainer.bad_steps must be skip or stop, not {self.bad_steps!r}", key="trainer.bad_steps"
            )
