from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import (
    ActorDied,
    ConfigError,
    EngineUnreachable,
    InfrastructureError,
    LaunchFailed,
    PortTaken,
    WaitTimeout,
)
from controllers.ports import EngineLauncher, LaunchSpec
from miles.cluster.ray_cluster import RayCluster
from miles.cluster.urls import split_url
from miles.engines.commands import EngineCommand
from miles.engines.host import HostedEngine
from miles.engines.launcher import COMMANDS, LauncherOptions, RayEngineLauncher, ServedEngine
from miles.engines.sglang_client import SGLangClient
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone_async
from tests.support.ray_session import ray_session
from tests.support.tiny_command import TinyCommand

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with ray_session() as cluster:
        yield cluster


def _spec(life: int = 1, engine: str = "engine-0") -> LaunchSpec:
    return LaunchSpec(engine, f"{engine}.{life}", f"{engine}.{life}:none")


def _launcher(
    client: SGLangClient, folder: Path, mode: str = "serve", ports: tuple[int, ...] = (), timeout_s: float = 60.0
) -> RayEngineLauncher:
    def command(options: LauncherOptions, spec: LaunchSpec) -> EngineCommand:
        return TinyCommand(spec.weight_version, mode, folder / "note")

    options = LauncherOptions(folder, folder, kind="tiny", ports=ports, launch_timeout_s=timeout_s)
    return RayEngineLauncher(options, client, {"tiny": command})


async def test_an_engine_lives_and_stops(ray_cluster: RayCluster, tmp_path: Path) -> None:
    async with SGLangClient() as client:
        launcher: EngineLauncher = _launcher(client, tmp_path)
        engine = await launcher.launch(_spec())
        assert (engine.engine, engine.incarnation, engine.ranks) == ("engine-0", "engine-0.1", 1)
        assert (await engine.health(5)).weight_version == "engine-0.1:none"
        leaving = asyncio.create_task(engine.wait_exit())
        await engine.stop(5)
        assert (await leaving).returncode == -signal.SIGTERM
        assert await wait_gone_async([engine.pid], 0) == []
        await engine.stop(5)
        assert await engine.wait_exit() == await leaving
        with pytest.raises(EngineUnreachable):
            await engine.health(1)


async def test_a_kill_of_the_engine_is_seen_within_half_a_second(ray_cluster: RayCluster, tmp_path: Path) -> None:
    async with SGLangClient() as client:
        engine = await _launcher(client, tmp_path).launch(_spec())
        leaving = asyncio.create_task(engine.wait_exit())
        await asyncio.sleep(0)
        killed = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        assert (await leaving).returncode == -signal.SIGKILL
        assert time.monotonic() - killed < 0.5
        await engine.stop(0)


async def test_a_host_that_dies_takes_its_engine_along(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Fails without die_with_parent.py, and when ActorDied is not taken for an exit in `wait_exit`."""
    async with SGLangClient() as client:
        engine = await _launcher(client, tmp_path).launch(_spec())
        leaving = asyncio.create_task(engine.wait_exit())
        await asyncio.sleep(0)
        os.kill(engine.host_pid, signal.SIGKILL)
        assert await wait_gone_async([engine.pid], 5) == []
        assert (await asyncio.wait_for(leaving, 10)).returncode is None
        await engine.stop(1)


async def test_a_launch_that_fails_or_is_cancelled_leaves_no_process(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Fails without `_abandon` in `launch`."""
    async with SGLangClient() as client:
        with pytest.raises(LaunchFailed, match="out of luck"):
            await _launcher(client, tmp_path, "crash").launch(_spec())
        with pytest.raises(LaunchFailed, match="did not answer"):
            await _launcher(client, tmp_path, "silent", timeout_s=0.5).launch(_spec())
        assert await wait_gone_async([await _noted(tmp_path / "note")], 5) == []
        (tmp_path / "note").unlink()
        launching = asyncio.create_task(_launcher(client, tmp_path, "silent").launch(_spec(2)))
        pid = await _noted(tmp_path / "note")
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert await wait_gone_async([pid], 5) == []


async def test_given_ports_are_kept_over_restarts(ray_cluster: RayCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = (free.getsockname()[1], taken.getsockname()[1])
        free.close()
        async with SGLangClient() as client:
            launcher = _launcher(client, tmp_path, ports=ports)
            first = await launcher.launch(_spec())
            assert split_url(first.url)[1] == ports[0]
            with pytest.raises(PortTaken, match=f"port {ports[1]} "):
                await launcher.launch(_spec(engine="engine-1"))
            await first.stop(0)
            again = await launcher.launch(_spec(2))
            assert split_url(again.url)[1] == ports[0]
            await again.stop(0)


@pytest.mark.parametrize(
    "error", [WaitTimeout("silent"), TimeoutError(), InfrastructureError("lost"), ActorDied("gone"), ValueError("bug")]
)
async def test_whatever_a_stop_ends_with_the_host_is_killed(error: Exception) -> None:
    """Fails if `kill` is not in the `finally` of ServedEngine.stop, or an error of the wait is not caught there."""
    host = DeafHost(error)
    engine = ServedEngine(_spec(), HostedEngine("http://127.0.0.1:1", 1, 2, {}), host, SGLangClient())
    with pytest.raises(ValueError) if isinstance(error, ValueError) else nullcontext():
        await engine.stop(0)
    assert host.kills == 1


class DeafHost:
    """A HostHandle whose calls raise `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.kills = 0

    async def call(self, method: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        raise self.error

    def kill(self) -> None:
        self.kills += 1


async def test_an_unknown_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engines\.kind 'vlm' cannot be launched; known: embedded"):
        RayEngineLauncher(LauncherOptions(tmp_path, tmp_path, kind="vlm"), SGLangClient())


def test_engines_of_one_seed_sample_differently(tmp_path: Path) -> None:
    """Fails when the seed goes to every engine as it is: a group spread over two would hold each sample twice."""
    options = LauncherOptions(tmp_path, tmp_path, seed=5)
    lives = [_spec(), _spec(2), _spec(engine="engine-1"), _spec()]
    seeds = [_seed(COMMANDS["embedded"](options, life)) for life in lives]
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]


def _seed(command: EngineCommand) -> str:
    argv = command.argv("127.0.0.1", 1)
    return argv[argv.index("--random-seed") + 1]


async def _noted(note: Path) -> int:
    """The pid the server wrote."""

    def look() -> int | None:
        return int(text) if note.exists() and (text := note.read_text()) else None

    return await when_written(note.parent, look)
