"""The checkpoints of a run folder: `step-000100`, each whole or absent, the newest few kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from miles.trainer.protocol import Trainer


class Checkpoints:
    """Names and prunes; the trainer writes."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder.resolve()
        self._keep = keep

    async def save(self, trainer: Trainer, step: int) -> Path:
        """Save the trainer's state of `step`; afterwards only the newest `keep` checkpoints are left."""
        target = self._folder / f"step-{step:06d}"
        if not target.exists():
            await trainer.save(target)
        await anyio.to_thread.run_sync(self._prune)
        return target

    def _prune(self) -> None:
        for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old)
