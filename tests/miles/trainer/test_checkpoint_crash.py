"""Killed at any moment of a save, a process leaves whole checkpoints only, the newest one before among them.

A process is forked for each file operation of a save and the removal that follows it, and kills itself just before
that operation. What it leaves is compared with whole checkpoints, file by file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from miles.checkpoints import checkpoint_folder, saved_steps, swept
from tests.miles.trainer.tiny import write_model

pytestmark = pytest.mark.real

TIMEOUT_S = 110.0
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
MOST_OPERATIONS = 300


@dataclass(frozen=True)
class Outcome:
    """What one killed process left."""

    operation: int
    killed: bool
    torn: list[set[tuple[str, int]]]
    """Files that are there or should be, by size, for each checkpoint that is not whole."""

    steps: list[int]
    leftovers: int


def test_every_kill_leaves_a_whole_checkpoint(swept_over: dict[str, list[Outcome]]) -> None:
    outcomes = swept_over["miles"]
    assert len(outcomes) > 15 and not outcomes[-1].killed and all(outcome.killed for outcome in outcomes[:-1])
    assert [outcome for outcome in outcomes if outcome.torn or not outcome.steps] == []
    assert {tuple(outcome.steps) for outcome in outcomes} == {(1,), (1, 2), (2,)}
    assert any(outcome.leftovers for outcome in outcomes)


def test_writing_in_place_is_found_out(swept_over: dict[str, list[Outcome]]) -> None:
    """The control of the test above: without the temporary name, a kill leaves a torn checkpoint."""
    assert swept_over["in place"][-1].torn


@pytest.fixture(scope="module")
def swept_over(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Saves killed before their first, second, ... operation, until one ends unharmed; and the control."""
    folder = tmp_path_factory.mktemp("crash")
    model = write_model(folder / "model")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_again_and_again, args=(theirs, model, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), "the killed processes took too long"
        outcomes: dict[str, list[Outcome]] = ours.recv()
        return outcomes
    finally:
        process.kill()
        process.join()


def kill_again_and_again(pipe: Connection, model: Path, folder: Path) -> None:
    """In a process without threads, which may fork."""
    import torch

    torch.set_num_threads(1)
    # Names of one length: a checkpoint's index holds its own path, and files are compared by size.
    root, whole = folder / "taken", folder / "whole"
    assert forked(lambda: save(model, whole, 1)) == 0
    assert forked(lambda: save(model, whole, 2)) == 0
    outcomes: dict[str, list[Outcome]] = {"miles": [], "in place": []}
    for way, found in outcomes.items():
        while len(found) < MOST_OPERATIONS:
            found.append(kill_once(model, root, whole, len(found) + 1, in_place=way == "in place"))
            if not found[-1].killed or (way == "in place" and found[-1].torn):
                break
        if way == "miles":
            assert forked(lambda: load(model, root)) == 0
    pipe.send(outcomes)


def kill_once(model: Path, root: Path, whole: Path, operation: int, *, in_place: bool) -> Outcome:
    """Save step 2 where step 1 is, killed before an operation; what is there afterwards."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(whole / "step-000001", root / "step-000001")
    killed = forked(lambda: save_and_prune(model, root, operation, in_place)) == signal.SIGKILL
    torn = [difference for step in saved_steps(root) if (difference := manifest(root, step) ^ manifest(whole, step))]
    leftovers = sum(path.name.endswith(".tmp") for path in root.iterdir())
    with swept(root):
        names = sorted(path.name for path in root.iterdir())
    assert names == [f"step-{step:06d}" for step in saved_steps(root)]
    return Outcome(operation, killed, torn, saved_steps(root), leftovers)


def forked(work: Any) -> int:
    """Run `work` in a fork; the signal that ended it, or its exit code."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def manifest(root: Path, step: int) -> set[tuple[str, int]]:
    """Names and sizes of a checkpoint's files."""
    folder = checkpoint_folder(root, step)
    return {(str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*")}


@contextlib.contextmanager
def killed_before(root: Path, operation: int) -> Iterator[None]:
    """End this process before the n-th operation on a file below `root`."""
    seen = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS and any(str(arg).startswith(str(root)) for arg in args[:2]):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    yield


def save(model: Path, root: Path, step: int) -> None:
    from miles.trainer.checkpoint import Counters, state_to_save
    from miles.trainer.checkpoint_writer import CheckpointWriter

    gpt, optimizer = trained(model)
    writer = CheckpointWriter(30.0)
    writer.begin(root / f"step-{step:06d}", state_to_save(gpt, optimizer, Counters(step)))
    writer.wait()


def save_and_prune(model: Path, root: Path, operation: int, in_place: bool) -> None:
    from miles.checkpoints import Checkpoints, KeepRule
    from miles.trainer import checkpoint_writer

    if in_place:
        mock.patch.object(checkpoint_writer, "temporary_beside", lambda target: target).start()
        mock.patch.object(checkpoint_writer, "publish", lambda temporary, target: None).start()
        mock.patch.object(checkpoint_writer.CheckpointWriter, "_remove", lambda writer, temporary: None).start()
    with killed_before(root, operation):
        save(model, root, 2)
        Checkpoints(root, KeepRule(1))._prune()


def load(model: Path, root: Path) -> None:
    from miles.trainer import checkpoint

    gpt, optimizer = trained(model)
    assert checkpoint.load(checkpoint_folder(root), gpt, optimizer).steps == 2


def trained(model: Path) -> tuple[Any, Any]:
    from miles.trainer import gradients
    from miles.trainer.architecture import read_architecture
    from miles.trainer.model import build_model
    from miles.trainer.optimizer import PortableFP32Optimizer
    from miles.trainer.options import TrainerOptions
    from miles.trainer.process_group import join_alone
    from miles.trainer.weights import load_hf

    join_alone()
    # Generators of unequal states take up unequal room in a checkpoint.
    random.seed(0)
    np.random.seed(0)
    arch = read_architecture(model)
    gpt = build_model(arch)
    load_hf(dict(gpt.named_parameters()), model, arch)
    gradients.with_gradient_buffers(gpt)
    return gpt, PortableFP32Optimizer(gpt, TrainerOptions(model))
