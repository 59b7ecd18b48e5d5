"""One waiting task for each incarnation, and none that is left over."""

from __future__ import annotations

import anyio

from controllers.lease import Revocation
from executors.revocation_watch import RevocationWatch
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_subscribers_share_a_watcher_and_are_told_once() -> None:
    told: list[str] = []
    revoked = Revocation()
    async with anyio.create_task_group() as tasks:
        watch = RevocationWatch(tasks)

        def teller(name: str) -> int:
            async def tell() -> None:
                told.append(name)

            return watch.subscribe(revoked, tell)

        tickets = [teller(name) for name in "abc"]
        watch.unsubscribe(revoked, tickets[1])
        await anyio.sleep(1)
        assert told == []
        revoked.set("drain", 0.0)
        await anyio.sleep(1)
        assert told == ["a", "c"]
        watch.unsubscribe(revoked, tickets[0])
        teller("late")
        await anyio.sleep(1)
        assert told == ["a", "c", "late"]


@virtual_time
async def test_the_watcher_ends_with_its_last_subscriber() -> None:
    """Fails (the block never ends) when `unsubscribe` does not cancel the watcher."""
    revoked = Revocation()

    async def never() -> None:
        raise AssertionError

    async with anyio.create_task_group() as tasks:
        watch = RevocationWatch(tasks)
        for _ in range(3):
            tickets = [watch.subscribe(revoked, never) for _ in range(2)]
            await anyio.sleep(1)
            for ticket in tickets:
                watch.unsubscribe(revoked, ticket)
