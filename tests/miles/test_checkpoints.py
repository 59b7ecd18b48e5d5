"""Checkpoints of a run: training goes on while one is written, one at a time, and only whole ones are ever seen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import anyio
import pytest

from controllers.errors import ActorDied, CheckpointFailed, ConfigError, WaitTimeout
from miles.checkpoints import Checkpoints, KeepRule, checkpoint_folder, saved_steps, swept
from miles.trainer.protocol import Trainer


class GatedTrainer:
    """Copies at once and writes when its gate is opened, as a Trainer does; raises `failure` in place of writing."""

    def __init__(self, *, copies: bool = True, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.gate = anyio.Event()
        self._copies = copies
        self._failure = failure

    async def save(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        self.calls.append(f"copy {folder.name}")
        if self._copies:
            on_copied()
        await self.gate.wait()
        if self._failure is not None:
            raise self._failure
        await anyio.Path(folder).mkdir(parents=True)
        self.calls.append(f"written {folder.name}")

    def as_trainer(self) -> Trainer:
        return cast(Trainer, self)


def made(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step-{step:06d}").mkdir(parents=True)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Fails when save waits for the writing: nobody would open the gate."""
    trainer = GatedTrainer()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            checkpoints = Checkpoints(tmp_path, KeepRule(2), beside=tasks)
            assert await checkpoints.save(trainer.as_trainer(), 7) == tmp_path / "step-000007"
            assert trainer.calls == ["copy step-000007"]
            assert saved_steps(tmp_path) == []
            trainer.gate.set()
    assert saved_steps(tmp_path) == [7]


async def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Fails without the lock: two copies of the state in memory, and writers that remove each other's folder."""
    trainer = GatedTrainer()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            checkpoints = Checkpoints(tmp_path, KeepRule(2), beside=tasks)
            await checkpoints.save(trainer.as_trainer(), 1)
            tasks.start_soon(checkpoints.save, trainer.as_trainer(), 2)
            await anyio.wait_all_tasks_blocked()
            assert trainer.calls == ["copy step-000001"]
            trainer.gate.set()
    assert trainer.calls == ["copy step-000001", "written step-000001", "copy step-000002", "written step-000002"]


@pytest.mark.parametrize("beside", [True, False])
async def test_without_a_copy_or_a_task_group_save_returns_when_it_is_whole(tmp_path: Path, beside: bool) -> None:
    trainer = GatedTrainer(copies=not beside)
    trainer.gate.set()
    async with anyio.create_task_group() as tasks:
        checkpoints = Checkpoints(tmp_path, KeepRule(2), beside=tasks if beside else None)
        target = await checkpoints.save(trainer.as_trainer(), 3)
        assert target.is_dir()


async def test_a_failure_reaches_whoever_waits_for_it(tmp_path: Path) -> None:
    """Before training has gone on the caller, afterwards the task group that holds the writing."""
    full = CheckpointFailed("rank 1: disk full")
    at_once = GatedTrainer(copies=False, failure=full)
    at_once.gate.set()
    async with anyio.create_task_group() as tasks:
        with pytest.raises(CheckpointFailed):
            await Checkpoints(tmp_path, KeepRule(2), beside=tasks).save(at_once.as_trainer(), 1)
    later = GatedTrainer(failure=full)
    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            await Checkpoints(tmp_path, KeepRule(2), beside=tasks).save(later.as_trainer(), 1)
            later.gate.set()
    assert raised.group_contains(CheckpointFailed)


@pytest.mark.parametrize("loss", [ActorDied("trainer-1 died"), WaitTimeout("no answer", waited_for="trainer-1")])
async def test_ranks_that_are_lost_while_they_write_lose_that_checkpoint_only(tmp_path: Path, loss: Exception) -> None:
    """Whether the run can go on is for the next step to find out."""
    made(tmp_path, 1)
    (tmp_path / ".step-000002.abcd1234.tmp").mkdir()
    dying, healthy = GatedTrainer(failure=loss), GatedTrainer()
    healthy.gate.set()
    async with anyio.create_task_group() as tasks:
        checkpoints = Checkpoints(tmp_path, KeepRule(2), beside=tasks)
        await checkpoints.save(dying.as_trainer(), 2)
        dying.gate.set()
        await checkpoints.save(healthy.as_trainer(), 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


@pytest.mark.parametrize(
    ("rule", "steps", "gone"),
    [
        (KeepRule(2), [0, 50, 100], [0]),
        (KeepRule(1), [0, 50, 100], [0, 50]),
        (KeepRule(2), [50], []),
        (KeepRule(1, every=100), [0, 50, 100, 150, 200, 250], [0, 50, 150]),
        (KeepRule(1), [999_999, 1_000_000], [999_999]),
    ],
)
def test_the_newest_stay_and_every_kth_for_good(rule: KeepRule, steps: list[int], gone: list[int]) -> None:
    assert rule.superseded(steps) == gone


async def test_pruning_follows_the_numbers_and_spares_what_is_new(tmp_path: Path) -> None:
    """Fails when checkpoints are ordered by name: a millionth step would count as older than step 999999."""
    trainer = GatedTrainer()
    trainer.gate.set()
    made(tmp_path, 999_998, 999_999)
    (tmp_path / "notes").mkdir()
    await Checkpoints(tmp_path, KeepRule(2)).save(trainer.as_trainer(), 1_000_000)
    assert names(tmp_path) == ["notes", "step-1000000", "step-999999"]
    assert checkpoint_folder(tmp_path) == tmp_path / "step-1000000"


def test_what_is_half_removed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a checkpoint is removed under its own name: a process killed meanwhile would leave a torn one."""
    made(tmp_path, 1, 2)
    (tmp_path / "step-000001" / "weights").write_text("w")
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_options: None)  # as if killed before the first file is gone
    Checkpoints(tmp_path, KeepRule(1))._prune()
    monkeypatch.undo()
    assert saved_steps(tmp_path) == [2] and len(names(tmp_path)) == 2
    with swept(tmp_path):
        assert names(tmp_path) == ["step-000002"]


def test_leftovers_are_swept_before_and_after(tmp_path: Path) -> None:
    made(tmp_path, 5)
    (tmp_path / ".step-000006.abcd1234.tmp").mkdir()
    with swept(tmp_path):
        assert names(tmp_path) == ["step-000005"]
        (tmp_path / ".step-000007.abcd1234.tmp" / "data").mkdir(parents=True)
    assert names(tmp_path) == ["step-000005"]
    with swept(tmp_path / "absent"):
        pass


def test_a_step_without_a_checkpoint_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        checkpoint_folder(tmp_path / "absent")
    made(tmp_path, 50, 100)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 75 .*only of 50, 100"):
        checkpoint_folder(tmp_path, 75)
    assert checkpoint_folder(tmp_path, 50) == tmp_path / "step-000050"
