"""How every kind of run begins and ends: a configuration that holds, a folder, a record, and one error out of many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles.assembly import check_names
from miles.checkpoints import FOLDER, swept
from miles.config import RunConfig, load_config
from miles.failure import root_cause
from miles.recorder import RunRecorder

Overrides = Mapping[str, Any] | Sequence[str]


@asynccontextmanager
async def recorded(
    config: RunConfig | str | Path, overrides: Overrides = ()
) -> AsyncIterator[tuple[RunConfig, RunRecorder]]:
    """Load and check the configuration, then make the run folder and record what happens until the block is left.

    Raises ConfigError for a bad configuration or a run folder that is in use, before anything is started.
    """
    resolved = config if isinstance(config, RunConfig) else load_config(config, overrides)
    check_names(resolved)
    # Outside all parts: when it sweeps up, no rank is left that could be writing a checkpoint.
    with RunRecorder(resolved) as recorder, swept(recorder.path / FOLDER):
        try:
            yield resolved, recorder
        except BaseExceptionGroup as group:
            # The groups are our task groups' wrapping: a person's `except ActorDied` must see the error itself.
            raise root_cause(group) from group
