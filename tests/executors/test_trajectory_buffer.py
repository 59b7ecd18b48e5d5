"""Order and staleness at the exit of the buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executors.errors import NegativeStaleness
from executors.trajectory import Group, StopReason, Trajectory, VersionSpan
from executors.trajectory_buffer import TrajectoryBuffer
from tests.executors.test_journal import make_group


def make_buffer(max_staleness: int, *groups: Group) -> tuple[TrajectoryBuffer, list[Group]]:
    stale: list[Group] = []
    buffer = TrajectoryBuffer(
        max_staleness=max_staleness, on_stale=stale.append, version_steps=lambda version: version - 1
    )
    for group in groups:
        buffer.put(group)
    return buffer, stale


def test_oldest_weights_leave_first_and_ties_by_arrival() -> None:
    groups = [make_group(0, 2), make_group(1, 1), make_group(2, 2), make_group(3, 1)]
    buffer, _ = make_buffer(5, *groups)
    batch = buffer.take_batch(step=4, groups_per_step=3)
    assert batch is not None
    assert batch.groups == (groups[1], groups[3], groups[0])
    assert batch.staleness == (2, 2, 1)
    assert len(buffer) == 1


def test_a_batch_knows_the_step_of_every_version_that_sampled_a_token_of_it() -> None:
    mixed = Trajectory(
        (1,), (2, 3, 4), (-0.1,) * 3, (VersionSpan(2, 0, 1, "i0"), VersionSpan(4, 1, 3, "i0")), StopReason.STOP, 1.0
    )
    group = make_group(1, 1)
    buffer, _ = make_buffer(5, make_group(0, 0), replace(group, trajectories=(mixed,)))
    batch = buffer.take_batch(step=5, groups_per_step=2)
    assert batch is not None
    assert batch.version_steps == {1: 0, 2: 1, 4: 3}


def test_no_batch_of_too_few() -> None:
    buffer, _ = make_buffer(1, make_group(0))
    assert buffer.take_batch(step=1, groups_per_step=2) is None
    assert len(buffer) == 1


def test_stale_groups_are_told_and_do_not_fill_a_batch() -> None:
    groups = [make_group(0, 0), make_group(1, 1), make_group(2, 2)]
    buffer, stale = make_buffer(1, *groups)
    assert buffer.take_batch(step=3, groups_per_step=3) is None
    assert stale == groups[:1]
    assert buffer.take(steps_done=3) == groups[2]
    assert stale == groups[:2]
    assert buffer.take(steps_done=3) is None


def test_a_sample_from_the_future_is_an_error() -> None:
    """O24. Fails when a negative staleness is let through."""
    buffer, _ = make_buffer(1, make_group(0, 50))
    with pytest.raises(NegativeStaleness) as error:
        buffer.take_batch(step=2, groups_per_step=1)
    assert error.value.staleness == -49
