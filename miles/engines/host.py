"""The supervisor of one engine's process, a Ray actor on the engine's node. It decides nothing.

`start` reserves a port, starts the process and returns when the server answers; `wait_exit` returns when the process
has ended. A host that dies takes its engine along (see process.py), so an actor that is gone is an engine that is gone.
Called by `RayEngineLauncher`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from controllers.errors import InfrastructureError, LaunchFailed, PortTaken
from controllers.ports import EngineExit
from miles.cluster.ports import PortReservation, reserve_port
from miles.cluster.urls import host_url
from miles.engines.commands import EngineCommand
from miles.engines.process import EngineProcess, ProcessSpec
from miles.engines.sglang_client import SGLangClient

PORT_ATTEMPTS = 5
PROBE_TIMEOUT_S = 2.0
FIRST_PROBE_AFTER_S = 0.05
LONGEST_BETWEEN_PROBES_S = 0.5

_PORT_TAKEN = re.compile(rf"address already in use|errno {errno.EADDRINUSE}\b|port \d+ .*(taken|in use)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HostRequest:
    """What to start. `port` None takes a free one. `weight_version` is the label the right server answers with."""

    engine: str
    command: EngineCommand
    weight_version: str
    host: str
    log_path: Path
    launch_timeout_s: float
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """A server that answers. `info` is its `/server_info`; `host_pid` is the supervisor's process."""

    url: str
    pid: int
    host_pid: int
    info: dict[str, object]


class EngineHost:
    """One engine's supervisor, for one incarnation."""

    def __init__(self) -> None:
        self._process: EngineProcess | None = None
        self._stopping = False

    async def start(self, request: HostRequest) -> HostedEngine:
        """Start the engine and wait until it answers. Raises LaunchFailed, or PortTaken for a port asked for."""
        deadline = time.monotonic() + request.launch_timeout_s
        for _ in range(PORT_ATTEMPTS):
            reservation = reserve_port(request.host, request.port)
            hosted = await self._attempt(request, reservation, deadline)
            if hosted is not None:
                return hosted
            if request.port is not None:
                raise PortTaken(
                    f"{request.engine}: port {request.port} of {request.host} is taken",
                    port=request.port,
                    host=request.host,
                )
        raise LaunchFailed(f"{request.engine}: other programs took {PORT_ATTEMPTS} ports in a row")

    async def wait_exit(self) -> EngineExit:
        """Return when the process has ended."""
        if self._process is None:
            return EngineExit(None, "it was never started")
        returncode = await self._process.wait()
        how = f"signal {-returncode}" if returncode < 0 else f"code {returncode}"
        return EngineExit(returncode, f"ended with {how}: {self._process.tail()[-500:]}")

    async def stop(self, grace_s: float) -> EngineExit:
        """End the process and its group, also in the middle of a start. Idempotent."""
        self._stopping = True
        if self._process is not None:
            await self._process.stop(grace_s)
        return await self.wait_exit()

    async def _attempt(
        self, request: HostRequest, reservation: PortReservation, deadline: float
    ) -> HostedEngine | None:
        """One start on one port: the server, or None when the port turned out to be taken."""
        argv = request.command.argv(request.host, reservation.port)
        try:
            process = await EngineProcess.start(ProcessSpec(argv, request.log_path, request.env))
        except BaseException:
            reservation.release()
            raise
        process.when_ended(reservation.release)
        self._process = process
        url = host_url(request.host, reservation.port)
        try:
            if self._stopping:
                raise LaunchFailed(f"{request.engine} was stopped while it was being started")
            info = await self._until_ready(request, process, url, deadline)
        except BaseException:
            # Also when cancelled: no process without an owner.
            with anyio.CancelScope(shield=True):
                await process.stop(0)
            raise
        if info is None:
            return None
        return HostedEngine(url, process.pid, os.getpid(), info)

    async def _until_ready(
        self, request: HostRequest, process: EngineProcess, url: str, deadline: float
    ) -> dict[str, object] | None:
        exited = asyncio.ensure_future(process.wait())
        pause_s = FIRST_PROBE_AFTER_S
        try:
            async with SGLangClient() as client:
                while time.monotonic() < deadline:
                    # The wait between two probes ends at once when the process does.
                    await asyncio.wait({exited}, timeout=pause_s)
                    if exited.done():
                        if _PORT_TAKEN.search(process.tail()) and not self._stopping:
                            return None
                        raise _launch_failure(request, f"ended with code {exited.result()} before it answered", process)
                    pause_s = min(pause_s * 1.5, LONGEST_BETWEEN_PROBES_S)
                    info = await _answer(client, url, request.weight_version)
                    if info is not None:
                        return info
        finally:
            exited.cancel()
        raise _launch_failure(request, f"did not answer at {url} within {request.launch_timeout_s} s", process)


def _launch_failure(request: HostRequest, what: str, process: EngineProcess) -> LaunchFailed:
    return LaunchFailed(
        f"{request.engine} {what}; its log {request.log_path} ends with:\n{process.tail()}",
        engine=request.engine,
        returncode=process.returncode,
    )


async def _answer(client: SGLangClient, url: str, weight_version: str) -> dict[str, object] | None:
    """The server's info when it is healthy and carries our label; a stranger on our port does not."""
    try:
        await client.check_health(url, PROBE_TIMEOUT_S)
        info = await client.server_info(url)
    except InfrastructureError:
        return None
    return info if info.get("weight_version", weight_version) == weight_version else None
