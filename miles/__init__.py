"""Miles: reinforcement learning for language models on a fleet of engines that may come and go.

    import miles

    async with miles.open_run("configs/quickstart.yaml", overrides={"train.steps": 50}) as run:
        ...

Importing this module imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.run import Run

__all__ = ["open_run"]


def open_run(
    config: RunConfig | str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> AbstractAsyncContextManager[Run]:
    """Open a run; see `miles.run.open_run`."""
    from miles.run import open_run as open_run_now

    return open_run_now(config, overrides)
