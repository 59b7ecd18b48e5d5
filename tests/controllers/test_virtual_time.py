from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from tests.support.virtual_time import VirtualTimeLoop, VirtualTimeStuck, virtual_time


def test_an_hour_takes_exactly_an_hour_of_virtual_time_and_none_of_ours() -> None:
    seen: list[float] = []

    @virtual_time
    async def sleeps() -> None:
        await anyio.sleep(3600)
        with anyio.move_on_after(60) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        seen.append(anyio.current_time())

    began = time.monotonic()
    sleeps()
    assert time.monotonic() - began < 30
    assert seen == [pytest.approx(3660)]


def test_a_loop_that_never_ends_is_reported() -> None:
    async def forever() -> None:
        for _ in range(10**9):
            await anyio.sleep(1)

    with (
        pytest.raises(VirtualTimeStuck, match=r"within 50\.0 virtual seconds"),
        asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_s=50.0)) as runner,
    ):
        runner.run(forever())


def test_arguments_and_assertions_pass_through() -> None:
    @virtual_time
    async def fails(what: str) -> None:
        assert what == "no"

    with pytest.raises(AssertionError):
        fails("yes")
