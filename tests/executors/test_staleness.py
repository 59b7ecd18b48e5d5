"""The admission gate's arithmetic and its wakers."""

from __future__ import annotations

import anyio
import pytest

from executors.staleness import AdmissionGate
from tests.support.virtual_time import virtual_time


@pytest.mark.parametrize(("published", "max_staleness", "groups", "limit"), [(0, 0, 4, 4), (0, 1, 4, 8), (7, 2, 3, 30)])
def test_limit(published: int, max_staleness: int, groups: int, limit: int) -> None:
    gate = AdmissionGate(max_staleness=max_staleness, groups_per_step=groups)
    gate.published(published)
    taken = 0
    while gate.is_open():
        gate.take()
        taken += 1
    assert taken == limit


def test_closed_until_weights_are_published() -> None:
    gate = AdmissionGate(max_staleness=3, groups_per_step=4)
    assert not gate.is_open()
    gate.published(0)
    assert gate.is_open()


def test_older_news_does_not_close_it() -> None:
    gate = AdmissionGate(max_staleness=0, groups_per_step=1)
    gate.published(5)
    gate.published(3)
    assert gate.limit == 6


def test_a_lineage_starts_with_the_steps_done() -> None:
    """Fails when trained groups are counted from 0 on resume: 57 steps' worth of groups would be let in at once."""
    gate = AdmissionGate(max_staleness=1, groups_per_step=16)
    gate.start_lineage(57)
    gate.published(57)
    assert gate.limit - gate.taken == 2 * 16


@virtual_time
async def test_woken_by_a_publication_and_by_an_untrained_group() -> None:
    def publish(gate: AdmissionGate) -> None:
        gate.published(1)

    for act in (publish, AdmissionGate.give_back):
        gate = AdmissionGate(max_staleness=0, groups_per_step=1)
        gate.published(0)
        gate.take()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.changed)
            await anyio.sleep(1)
            act(gate)
        assert gate.is_open()


@virtual_time
async def test_without_a_bound_the_reader_makes_room() -> None:
    """Fails when `hand_out` counts groups nobody will train."""
    gate = AdmissionGate(max_staleness=None, groups_per_step=2)
    gate.start_lineage(10)
    gate.published(10)
    for _ in range(4):
        assert gate.is_open()
        gate.take()
    assert not gate.is_open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.changed)
        await anyio.sleep(1)
        gate.hand_out(1)
    assert gate.is_open()
