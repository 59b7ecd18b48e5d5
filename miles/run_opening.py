"""How every kind of run begins and ends: a configuration that holds, a folder, a record, and one error out of many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from controllers.errors import ConfigError
from miles.assembly import check_names
from miles.checkpoints import FOLDER, swept
from miles.config import RunConfig, load_config
from miles.failure import root_cause
from miles.recorder import RunRecorder

Overrides = Mapping[str, Any] | Sequence[str]
Kind = Literal["run", "replay", "rollout"]

FIRST_LINEAGE = 1


def kind_of(config: RunConfig) -> Kind:
    """What `debug` asks for: the whole of a run, or one half of it."""
    if config.debug.replay is not None:
        return "replay"
    return "rollout" if config.debug.rollout_only else "run"


def start_timeout_s(config: RunConfig) -> float:
    """How long the first engine may take until it serves."""
    return config.engines.launch_timeout_s + config.engines.sync_timeout_s


@asynccontextmanager
async def recorded(
    config: RunConfig | str | Path, overrides: Overrides, kind: Kind
) -> AsyncIterator[tuple[RunConfig, RunRecorder]]:
    """Load and check the configuration, then make the run folder and record what happens until the block is left.

    Raises ConfigError for a bad configuration, one for another kind of run, or a run folder that is in use, before
    anything is started.
    """
    resolved = config if isinstance(config, RunConfig) else load_config(config, overrides)
    if (asked := kind_of(resolved)) != kind:
        raise ConfigError(f"debug: asks for a {asked}, and is opened as a {kind}", key="debug")
    check_names(resolved)
    # Outside all parts: when it sweeps up, no rank is left that could be writing a checkpoint.
    with RunRecorder(resolved) as recorder, swept(recorder.path / FOLDER):
        try:
            yield resolved, recorder
        except BaseExceptionGroup as group:
            # The groups are our task groups' wrapping: a person's `except ActorDied` must see the error itself.
            raise root_cause(group) from group
