"""Who the control server listens to."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from miles.weight_sync.control_client import ControlClient, ControlRefused, NoLongerWanted
from miles.weight_sync.messages import PROTOCOL, Ask, Ready
from miles.weight_sync.options import WeightSyncOptions
from tests.miles.weight_sync.harness import publish, rig

pytestmark = pytest.mark.real


async def test_votes_of_an_earlier_life_are_dropped_and_counted(disk: WeightSyncOptions) -> None:
    """Fails if the service looks sessions up by engine instead of incarnation."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine().incarnation
        with anyio.fail_after(30):
            await r.controller.restart("engine-0")
        client = ControlClient(r.service._server.url, r.service._token, old, 0, attempts=1)
        with pytest.raises(NoLongerWanted):
            await anyio.to_thread.run_sync(client.vote, Ready(incarnation=old, rank=0))
        assert r.service.statistics().stale_votes == 1
        client.close()


async def test_the_control_server_refuses_strangers_and_other_protocols(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        stranger = ControlClient(r.service._server.url, "guess", "i", 0, attempts=1)
        with pytest.raises(ControlRefused, match="401"):
            await anyio.to_thread.run_sync(stranger.next_job)
        other = ControlClient(r.service._server.url, r.service._token, "i", 0, attempts=1)
        other._ask = Ask(PROTOCOL + 1, "i", 0)
        with pytest.raises(ControlRefused, match=f"protocol {PROTOCOL + 1} is not {PROTOCOL}"):
            await anyio.to_thread.run_sync(other.next_job)
        stranger.close()
        other.close()
