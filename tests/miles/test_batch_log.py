"""Batches on disk: equal after a round trip, whole or absent, removed when a checkpoint covers them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from executors.trajectory import Batch, Group, Prompt, StopReason, Trajectory, VersionSpan
from miles.batch_log import BatchLog, batch_file, logged_steps, read_batch, write_batch


def batch(step: int, groups: int = 2) -> Batch:
    """A batch in which every field has a value of its own."""
    spans = (VersionSpan(7, 0, 2, "engine-0.1"), VersionSpan(8, 2, 3, "engine-1.4"))
    logprobs, mask = (-0.1, -2.0, -1e-300), (True, False, True)
    full = Trajectory((1, 2), (3, 4, 5), logprobs, spans, StopReason.LENGTH, 0.1, mask)
    unscored = Trajectory((1, 2), (), (), (), StopReason.STOP, None)
    made = tuple(
        Group(
            f"g{index:08d}", Prompt(index, (1, 2), "é", "text", {"level": [1, {"a": None}]}), (full, unscored), step - 1
        )
        for index in range(groups)
    )
    return Batch(made, step, tuple(range(groups)), {7: 6, 8: 7})


@pytest.mark.parametrize("groups", [0, 1, 2, 20])
def test_a_batch_is_the_same_after_a_round_trip(groups: int, tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "a-batch"
    write_batch(path, batch(3, groups))
    assert read_batch(path) == batch(3, groups)


def test_rewards_and_logprobs_that_are_not_finite_survive(tmp_path: Path) -> None:
    """What made a step fail must be in the file that is kept for study."""
    values = (math.nan, math.inf, -math.inf)
    odd = replace(batch(1).groups[0].trajectories[0], logprobs=values, reward=math.nan)
    write_batch(tmp_path / "b", Batch((replace(batch(1).groups[0], trajectories=(odd,)),), 1, (0,)))
    (read,) = read_batch(tmp_path / "b").groups[0].trajectories
    assert repr(read) == repr(odd)


def test_a_batch_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Fails when the file is written in place."""
    good = batch(1)
    write_batch(tmp_path / "b", good)
    bad = replace(
        good, groups=(good.groups[0], replace(good.groups[1], prompt=Prompt(1, (1,), "", "", {"x": object()})))
    )
    with pytest.raises(TypeError):
        write_batch(tmp_path / "b", bad)
    assert read_batch(tmp_path / "b") == good
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("content", [b"", b"\x90", b"{}", b"\x91\x94\xa1x\x01\x90\x80"])
def test_a_file_that_is_no_batch_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(ConfigError, match="odd"):
        read_batch(tmp_path / "odd")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", batch(1))
    whole = (tmp_path / "b").read_bytes()
    for length in range(0, len(whole), 17):
        (tmp_path / "b").write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            read_batch(tmp_path / "b")


async def test_a_checkpoint_removes_what_it_covers(tmp_path: Path) -> None:
    log = BatchLog(tmp_path / "batches")
    await log.covered(0)
    for step in (1, 2, 3, 12):
        assert await log.add(batch(step)) == batch_file(tmp_path / "batches", step)
    await log.add(batch(3, groups=5))
    await log.covered(2)
    assert logged_steps(log.folder) == [3, 12]
    assert await log.read(3) == batch(3, groups=5)
    with pytest.raises(ConfigError, match="step-000002"):
        await log.read(2)


async def test_a_log_that_is_kept_loses_nothing(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, keep=True)
    await log.add(batch(1))
    await log.covered(1)
    assert logged_steps(tmp_path) == [1]
