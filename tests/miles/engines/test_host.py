from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from controllers.errors import LaunchFailed, PortTaken
from miles.cluster.urls import split_url
from miles.engines.host import EngineHost, HostRequest
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone_async
from tests.support.tiny_command import TinyCommand

pytestmark = pytest.mark.real

LABEL = "engine-0.1:none"


def _request(
    tmp_path: Path,
    mode: str = "serve",
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    launch_timeout_s: float = 20.0,
    answers: str = LABEL,
) -> HostRequest:
    return HostRequest(
        engine="engine-0",
        command=TinyCommand(answers, mode, tmp_path / "note"),
        weight_version=LABEL,
        host=host,
        log_path=tmp_path / "engine.log",
        launch_timeout_s=launch_timeout_s,
        port=port,
    )


async def _noted(note: Path) -> int:
    """The pid the server wrote."""

    def look() -> int | None:
        return int(text) if note.exists() and (text := note.read_text()) else None

    return await when_written(note.parent, look)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_start_stop_and_the_exit_that_is_reported(tmp_path: Path, address: str) -> None:
    host = EngineHost()
    hosted = await host.start(_request(tmp_path, host=address))
    assert hosted.info["pid"] == hosted.pid and hosted.host_pid == os.getpid()
    assert split_url(hosted.url)[0] == address
    leaving = asyncio.create_task(host.wait_exit())
    stopped = await host.stop(5)
    assert stopped.returncode == -signal.SIGTERM
    assert await leaving == stopped
    assert await host.stop(5) == stopped


async def test_a_crash_at_the_start_is_reported_at_once_with_its_last_lines(tmp_path: Path) -> None:
    """Fails when only the deadline ends the wait for an answer."""
    async with asyncio.timeout(10):
        with pytest.raises(LaunchFailed, match=r"(?s)engine-0 ended with code 3 .*loading.*out of luck"):
            await EngineHost().start(_request(tmp_path, "crash", launch_timeout_s=600))


async def test_a_server_that_never_answers_is_ended_at_the_deadline(tmp_path: Path) -> None:
    """Fails without the `process.kill` in `_attempt`."""
    with pytest.raises(LaunchFailed, match=r"did not answer at http://127.0.0.1:\d+ within 0.5 s"):
        await EngineHost().start(_request(tmp_path, "silent", launch_timeout_s=0.5))
    assert await wait_gone_async([int((tmp_path / "note").read_text())], 5) == []


async def test_a_port_that_somebody_took_first_is_exchanged(tmp_path: Path) -> None:
    host = EngineHost()
    hosted = await host.start(_request(tmp_path, "port-taken-once"))
    first = int((tmp_path / "note").read_text())
    assert split_url(hosted.url)[1] != first
    await host.stop(0)


async def test_a_port_that_was_asked_for_and_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken"):
            await EngineHost().start(_request(tmp_path, port=port))


async def test_a_port_that_was_asked_for_and_is_lost_in_between_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PortTaken, match=f"engine-0: port {port} of 127.0.0.1 is taken"):
        await EngineHost().start(_request(tmp_path, "port-taken-once", port=port))


async def test_an_explicit_port_can_be_used_by_the_next_life(tmp_path: Path) -> None:
    """Fails when the reservation outlives the engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for _ in range(2):
        host = EngineHost()
        hosted = await host.start(_request(tmp_path, port=port))
        assert split_url(hosted.url)[1] == port
        await host.stop(0)


async def test_a_stranger_that_answers_on_the_port_is_not_our_engine(tmp_path: Path) -> None:
    """Fails without the comparison of labels in `_answer`."""
    with pytest.raises(LaunchFailed, match="did not answer"):
        await EngineHost().start(_request(tmp_path, answers="somebody:7", launch_timeout_s=1))


async def test_stop_in_the_middle_of_a_start_ends_it(tmp_path: Path) -> None:
    """Fails when `stop` only knows engines that have answered."""
    host = EngineHost()
    starting = asyncio.create_task(host.start(_request(tmp_path, "silent", launch_timeout_s=600)))
    await _noted(tmp_path / "note")
    await host.stop(0)
    with pytest.raises(LaunchFailed, match="ended with code -9"):
        await asyncio.wait_for(starting, 10)


async def test_cancelling_a_start_leaves_no_process(tmp_path: Path) -> None:
    """Fails without the `process.kill` in `_attempt`."""
    starting = asyncio.create_task(EngineHost().start(_request(tmp_path, "silent", launch_timeout_s=600)))
    await _noted(tmp_path / "note")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await wait_gone_async([int((tmp_path / "note").read_text())], 5) == []


async def test_eight_engines_at_once_get_eight_ports(tmp_path: Path) -> None:
    hosts = [EngineHost() for _ in range(8)]
    hosted = await asyncio.gather(*(host.start(_request(tmp_path)) for host in hosts))
    try:
        assert len({engine.url for engine in hosted}) == 8
    finally:
        await asyncio.gather(*(host.stop(0) for host in hosts))


async def test_a_stubborn_engine_and_its_family_are_ended(tmp_path: Path) -> None:
    host = EngineHost()
    await host.start(_request(tmp_path, "stubborn"))
    assert (await host.stop(0.2)).returncode == -signal.SIGKILL
    host = EngineHost()
    await host.start(_request(tmp_path, "family"))
    child = int((tmp_path / "note").read_text())
    await host.stop(5)
    assert await wait_gone_async([child], 5) == []
