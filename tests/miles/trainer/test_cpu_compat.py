"""Patches for machines without a GPU are process-wide: what a checkpoint's thread calls must not be among them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.miles.trainer.tiny import learner, random_batch, write_model

pytestmark = pytest.mark.usefixtures("megatron")


class Calls:
    """A profile function that keeps which file each call went to, and the device functions among them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.of_devices: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.files.add(Path(frame.f_code.co_filename).name)
            if frame.f_code in (torch.cuda.current_device.__code__, torch.cuda.synchronize.__code__):
                self.of_devices.add(frame.f_code.co_name)

    @property
    def patched(self) -> set[str]:
        """Files with functions that `running_on_cpu` replaces or puts in their place."""
        places = {"cpu_compat.py", "uneven_collectives.py", "schedules.py", "mappings.py"}
        return (self.files & places) | self.of_devices


def test_the_thread_that_writes_a_checkpoint_meets_no_patch(tmp_path: Path) -> None:
    """The training thread is the control: it does meet them, meanwhile."""
    trained = learner(write_model(tmp_path / "model"))
    training, writing = Calls(), Calls()
    threading.setprofile(writing)
    try:
        trained.begin_save(tmp_path / "checkpoint")
        sys.setprofile(training)
        trained.step(random_batch(1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    trained.finish_save()
    assert "checkpoint_writer.py" in writing.files and not writing.patched
    assert "cpu_compat.py" in training.patched
