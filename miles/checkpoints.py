"""The checkpoints of a run folder: `step-000100`, each whole or absent; old ones go, by a rule.

    save -> the trainer copies its state -> training goes on | the trainer writes -> the folder appears -> prune

One is written at a time, so that memory holds one copy. Only a folder under its own name is a checkpoint: everything
that is being written or removed has a temporary name, and is swept up by `swept` if its process died meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from controllers.errors import ActorDied, ConfigError, WaitTimeout
from miles.trainer.folders import remove_leftovers, remove_whole
from miles.trainer.protocol import Trainer

log = structlog.get_logger(__name__)

FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Which checkpoints stay: the newest ones, and for good those of steps that `every` divides (0: none)."""

    newest: int
    every: int = 0

    def superseded(self, steps: list[int]) -> list[int]:
        """Those of `steps` that go; step 0 is not kept for good, and the newest always stays."""
        return [step for step in sorted(steps)[: -max(1, self.newest)] if not self._for_good(step)]

    def _for_good(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, ascending; none where there is no such folder."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{6,})", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def checkpoint_folder(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, by default the newest. Raises ConfigError where there is none, saying which are."""
    steps = saved_steps(folder)
    if not steps:
        raise ConfigError(f"{str(folder)!r} holds no checkpoint")
    if step is not None and step not in steps:
        there = ", ".join(str(saved) for saved in steps)
        raise ConfigError(f"there is no checkpoint of step {step} in {str(folder)!r}, only of {there}", step=step)
    return _named(folder, steps[-1] if step is None else step)


@contextmanager
def swept(folder: Path) -> Iterator[None]:
    """Remove what was left half done in `folder`, before and after. No trainer may be at work there at those times."""
    remove_leftovers(folder)
    try:
        yield
    finally:
        remove_leftovers(folder)


class Checkpoints:
    """Names, orders and prunes; the trainer writes."""

    def __init__(self, folder: Path, rule: KeepRule, *, beside: TaskGroup | None = None) -> None:
        """Write in the task group `beside` while training goes on; without one, `save` waits for the writing."""
        self._folder = folder.resolve()
        self._rule = rule
        self._beside = beside
        self._turn = anyio.Lock()

    async def save(self, trainer: Trainer, step: int) -> Path:
        """Save the trainer's state, which is that of `step`; returns where it is or will be.

        Returns once the trainer has copied its state, or has written it all where nothing is written beside. Waits for
        the save before. Raises what the trainer raised; once training has gone on, the task group does.
        """
        target = _named(self._folder, step)
        if self._beside is None:
            await self._write(trainer, step, target)
        else:
            await self._beside.start(self._write, trainer, step, target, name=f"checkpoint {step}")
        return target

    async def _write(
        self, trainer: Trainer, step: int, target: Path, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        copied = False

        def on_copied() -> None:
            nonlocal copied
            if not copied:
                copied = True
                task_status.started()

        async with self._turn:
            if not await anyio.Path(target).exists():
                await anyio.to_thread.run_sync(remove_leftovers, self._folder)
                try:
                    await trainer.save(target, on_copied)
                except (ActorDied, WaitTimeout) as error:
                    if not copied:
                        raise
                    # Whether lost ranks end the run is for the next step to say; the checkpoint before this one is
                    # whole, and the next one due will be.
                    log.warning("checkpoint_lost", step=step, error=str(error))
                    return
            on_copied()
            await anyio.to_thread.run_sync(self._prune)
        log.info("checkpoint_saved", step=step, folder=str(target))

    def _prune(self) -> None:
        for step in self._rule.superseded(saved_steps(self._folder)):
            remove_whole(_named(self._folder, step))


def _named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"
