"""Where training stands, kept by the driver so that new ranks can be brought exactly there.

    model folder or last checkpoint -> every update since, in order

Batches of steps lie on disk from before their step runs until a checkpoint covers them. Warm-up examples are kept in
memory: checkpoint 0 follows the warm-up. Invariant: what is replayed are the updates that succeeded, each once.
"""

from __future__ import annotations

from pathlib import Path

import anyio

from controllers.errors import ActorDied, MilesError
from executors.trajectory import Batch
from miles.batch_log import BatchLog
from miles.trainer.protocol import Example
from miles.trainer.rank_group import RankGroup

WarmupStep = tuple[list[Example], float]


class Standing:
    """Told of each update and checkpoint; `restore` repeats them. Without a log, steps cannot be repeated."""

    def __init__(self, batches: BatchLog | None) -> None:
        self._batches = batches
        self._step = 0
        self._checkpoint: tuple[Path, int] | None = None
        self._since: list[int | WarmupStep] = []
        self._unconfirmed: tuple[Path, int, int] | None = None
        self.updates = 0
        """How many updates there have been; loading counts as one."""

    async def about_to_step(self, batch: Batch) -> None:
        """Log a batch before its step runs."""
        await self.confirm()
        if self._batches is not None:
            await self._batches.add(batch)

    def stepped(self, step: int) -> None:
        """The step of the batch logged last is done."""
        self._step = step
        self._add(step)

    def warmed_up(self, examples: list[Example], lr: float) -> None:
        """A warm-up step is done."""
        self._add((examples, lr))

    def saving(self, folder: Path) -> None:
        """A checkpoint of this moment is being written. It counts once it is whole, that is, once `folder` is there."""
        self._unconfirmed = (folder, self._step, len(self._since))

    def loaded(self, folder: Path, step: int) -> None:
        """Training goes on from this checkpoint."""
        self._checkpoint, self._step, self._since, self._unconfirmed = (folder, step), step, [], None
        self.updates += 1

    async def restore(self, group: RankGroup, timeout_s: float) -> int:
        """Bring fresh ranks to where training stands; the number of updates that were repeated.

        `timeout_s` is for each call. Raises ActorDied for a step that was not logged, or what the ranks raise.
        """
        await self.confirm()
        if self._checkpoint is not None:
            folder, expected = self._checkpoint
            found = (await group.call("load", folder, timeout_s=timeout_s))[0]
            if found != expected:
                raise MilesError(f"checkpoint {str(folder)!r} is of step {found}, and was saved at step {expected}")
        for update in self._since:
            if isinstance(update, int):
                await group.call("step", await self._logged(update), timeout_s=timeout_s)
            else:
                await group.call("warmup_step", *update, timeout_s=timeout_s)
        return len(self._since)

    async def confirm(self) -> None:
        """Take over a checkpoint that is whole by now."""
        if self._unconfirmed is None:
            return
        folder, step, updates = self._unconfirmed
        if not await anyio.Path(folder).is_dir():
            return
        self._checkpoint, self._unconfirmed = (folder, step), None
        del self._since[:updates]
        if self._batches is not None:
            await self._batches.covered(step)

    def _add(self, update: int | WarmupStep) -> None:
        self._since.append(update)
        self.updates += 1

    async def _logged(self, step: int) -> Batch:
        if self._batches is None:
            raise ActorDied(f"step {step} cannot be trained again on new ranks: its batch was not kept on disk")
        return await self._batches.read(step)
