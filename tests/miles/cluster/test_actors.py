from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RaySystemError

from controllers.errors import ActorDied, EngineRejected, InfrastructureError, WaitTimeout
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.cluster.ray_cluster import RayCluster, RayOptions
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session

pytestmark = pytest.mark.real


class Subject:
    """What the tests call in an actor."""

    def __init__(self, start: int) -> None:
        self._sum = start

    async def add(self, number: int) -> int:
        self._sum += number
        return self._sum

    async def refuse(self) -> None:
        raise EngineRejected("no", status=418)

    async def time_out(self) -> None:
        raise TimeoutError("its own")

    async def lose_an_object(self) -> None:
        raise RaySystemError("an object was lost")  # type: ignore[no-untyped-call]

    async def wait(self) -> None:
        import asyncio

        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with ray_session() as cluster:
        yield cluster


def _start(name: str) -> RemoteActor:
    return start_actor(Subject, 1, options=ActorOptions(name, max_concurrency=4))


async def test_calls_errors_and_deadlines(ray_cluster: RayCluster) -> None:
    actor = _start("subject")
    assert await actor.call("add", 2) == 3
    with pytest.raises(EngineRejected, match="no") as refused:
        await actor.call("refuse")
    assert refused.value.status == 418
    with pytest.raises(WaitTimeout, match=r"subject\.wait did not return within 0\.1 s"):
        await actor.call("wait", timeout_s=0.1)
    actor.kill()


async def test_a_timeout_raised_by_the_method_is_not_ours(ray_cluster: RayCluster) -> None:
    """Fails when RayTaskError is not looked at first: Ray's class would pass for a TimeoutError of the wait."""
    actor = _start("subject")
    with pytest.raises(TimeoutError, match="its own"):
        await actor.call("time_out", timeout_s=30)
    actor.kill()


async def test_rays_own_failures_are_infrastructure(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only RayActorError is mapped: Ray's errors would get past whoever supervises the call."""
    actor = _start("subject")
    with pytest.raises(InfrastructureError, match="an object was lost"):
        await actor.call("lose_an_object")

    def refuse(*args: object) -> None:
        raise GetTimeoutError("the store is busy")

    monkeypatch.setattr(actor, "_handle", SimpleNamespace(add=SimpleNamespace(remote=refuse)))
    with pytest.raises(InfrastructureError, match=r"subject\.add: GetTimeoutError: the store is busy"):
        await actor.call("add", 1)
    monkeypatch.undo()
    actor.kill()


async def test_a_dead_actor_is_named(ray_cluster: RayCluster) -> None:
    actor = _start("subject")
    with pytest.raises(ActorDied) as died:
        await actor.call("die")
    assert died.value.actor == "subject"
    actor.kill()


async def test_kill_ends_the_process_and_can_be_repeated(ray_cluster: RayCluster) -> None:
    actor = _start("subject")
    pid = await actor.call("pid")
    actor.kill()
    assert await wait_gone_async([pid], 10) == []
    actor.kill()
    with pytest.raises(ActorDied):
        await actor.call("pid")


async def test_a_connection_that_is_there_already_is_used_and_left(ray_cluster: RayCluster) -> None:
    async with RayCluster(RayOptions()) as second:
        assert second.folder is None
    actor = _start("subject")
    assert await actor.call("add", 1) == 2
    actor.kill()
