"""Slots and leases: the committed slot is never given out, leases end, and a publication never waits for ever."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from miles.weight_sync.leases import LeaseTable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("committed", [None, 0, 1, 2])
async def test_the_committed_slot_is_never_chosen(committed: int | None) -> None:
    """Fails if `slot != committed` is dropped in LeaseTable.free_slot."""
    table = LeaseTable(3, 10.0, Clock())
    assert await table.free_slot(committed, 0.0) != committed


async def test_a_leased_slot_is_not_chosen_until_it_is_released() -> None:
    """Fails if `slot not in taken` is dropped in LeaseTable.free_slot."""
    table = LeaseTable(3, 10.0, time.monotonic)
    lease = table.grant(("e", 0), 1, 1)
    assert await table.free_slot(0, 5.0) == 2
    other = table.grant(("f", 0), 1, 2)
    chosen: list[int] = []

    async def choose() -> None:
        chosen.append(await table.free_slot(0, 5.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(choose)
        await anyio.wait_all_tasks_blocked()
        assert chosen == []
        table.release(other.lease)
    assert chosen == [2]
    assert table.renew(lease.lease)
    assert table.revoked == 0


async def test_after_the_deadline_the_slowest_readers_slot_is_taken() -> None:
    """Fails if free_slot waits for ever, or takes the committed slot."""
    clock = Clock()
    table = LeaseTable(3, 10.0, clock)
    slow = table.grant(("slow", 0), 1, 2)
    clock.now += 1
    fast = table.grant(("fast", 0), 2, 1)
    on_committed = table.grant(("current", 0), 3, 0)
    assert await table.free_slot(0, 0.01) == 2
    assert not table.renew(slow.lease)
    assert table.renew(fast.lease)
    assert table.renew(on_committed.lease)
    assert table.revoked == 1


async def test_a_slot_that_comes_free_as_the_time_is_up_is_taken() -> None:
    """Fails (there is nothing to revoke) without the second look in LeaseTable.free_slot."""
    table = LeaseTable(2, 10.0, time.monotonic)
    lease = table.grant(("e", 0), 1, 1)
    loop = asyncio.get_running_loop()
    # Two turns on: after the deadline has cancelled the wait, before the waiter has its turn.
    loop.call_soon(loop.call_soon, table.release, lease.lease)
    assert await table.free_slot(0, 0.0) == 1
    assert table.revoked == 0


async def test_a_lease_that_is_not_renewed_expires() -> None:
    clock = Clock()
    table = LeaseTable(2, 10.0, clock)
    kept, left = table.grant(("kept", 0), 1, 1), table.grant(("left", 0), 2, None)
    clock.now += 6
    assert table.renew(kept.lease)
    clock.now += 6
    assert table.versions() == {1}
    assert not table.renew(left.lease)
    assert table.expired == 1
    clock.now += 20
    assert await table.free_slot(0, 5.0) == 1


async def test_waiting_for_a_slot_ends_when_a_lease_expires() -> None:
    table = LeaseTable(2, 0.02, time.monotonic)
    table.grant(("dead", 0), 1, 1)
    assert await table.free_slot(0, 30.0) == 1
    assert (table.expired, table.revoked) == (1, 0)


def test_a_reader_has_one_lease_at_a_time() -> None:
    table = LeaseTable(2, 10.0, Clock())
    first = table.grant(("e", 0), 1, 0)
    table.grant(("e", 0), 2, 1)
    assert table.active() == 1
    assert not table.renew(first.lease)


async def test_when_the_slots_are_gone_so_are_their_leases() -> None:
    """Fails (the slot is waited for) when new ranks' slots count as read because the lost ones' were."""
    table = LeaseTable(2, 100.0, lambda: 0.0)
    kept = table.grant(("e0", 0), 1, None)
    slots = [table.grant(("e1", rank), 1, rank) for rank in (0, 1)]
    table.release_slots()
    assert table.renew(kept.lease) and not any(table.renew(lease.lease) for lease in slots)
    assert await table.free_slot(None, 0.0) == 0
    assert table.revoked == 0
