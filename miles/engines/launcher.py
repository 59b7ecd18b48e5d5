"""Starts engine incarnations as Ray actors and hands them out as controllers.ports.Engine.

    RayEngineLauncher.launch -> EngineHost (actor on the engine's node) -> engine process
            |                                                                   ^
            +--> ServedEngine -- SGLang's HTTP API, straight from the driver ---+

A host that is gone is an engine that has exited. A launch that fails or is cancelled leaves no process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import structlog

from controllers.errors import ActorDied, ConfigError, InfrastructureError, LaunchFailed, WaitTimeout
from controllers.ports import EngineExit, EngineHealth, LaunchSpec, PauseMode
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.engines.commands import EmbeddedCommand, EngineCommand
from miles.engines.host import EngineHost, HostedEngine, HostRequest
from miles.engines.sglang_client import SGLangClient
from miles.engines.tensor_payload import encode_manifest

log = structlog.get_logger(__name__)

HOST_CONCURRENCY = 32
HOST_START_TIMEOUT_S = 60.0
ANSWER_MARGIN_S = 10.0
ABANDON_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LauncherOptions:
    """What all incarnations have in common.

    `ports` are given to engines in the order of their first launch, and kept over restarts; engines beyond them take
    free ones. `args` are flags of the engine's own command line. `threads` is its OMP_NUM_THREADS.
    """

    model_path: Path
    log_dir: Path
    kind: str = "embedded"
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    weight_loader: str | None = None
    max_running_requests: int = 64
    seed: int = 0
    args: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    num_gpus: float = 0.0
    launch_timeout_s: float = 120.0


def _embedded(options: LauncherOptions, spec: LaunchSpec) -> EngineCommand:
    # Engines of one seed would give the same prompt the same samples; so would an engine before and after a restart.
    seed = (options.seed + zlib.crc32(spec.incarnation.encode())) % 2**31
    return EmbeddedCommand(
        model_path=options.model_path,
        weight_version=spec.weight_version,
        max_running_requests=options.max_running_requests,
        random_seed=seed,
        weight_loader=options.weight_loader,
        args=options.args,
    )


CommandFactory = Callable[[LauncherOptions, LaunchSpec], EngineCommand]

COMMANDS: Mapping[str, CommandFactory] = {"embedded": _embedded}
"""How to make the command of each kind of engine that can be launched."""


class HostHandle(Protocol):
    """The part of RemoteActor that an engine needs of its host."""

    async def call(self, method: str, /, *args: Any, timeout_s: float | None = None) -> Any: ...

    def kill(self) -> None: ...


class RayEngineLauncher:
    """Implements controllers.ports.EngineLauncher. Needs a Ray connection and an open client."""

    def __init__(
        self, options: LauncherOptions, client: SGLangClient, commands: Mapping[str, CommandFactory] = COMMANDS
    ) -> None:
        if options.kind not in commands:
            raise ConfigError(f"engines.kind {options.kind!r} cannot be launched; known: {', '.join(commands)}")
        self._make_command = commands[options.kind]
        self._options = options
        self._client = client
        self._ports: dict[str, int | None] = {}

    async def launch(self, spec: LaunchSpec) -> ServedEngine:
        """Start one incarnation; return when its server answers.

        Raises LaunchFailed (with the last lines it printed), or PortTaken for a port that was asked for.
        """
        options = self._options
        request = HostRequest(
            engine=spec.engine,
            command=self._make_command(options, spec),
            weight_version=spec.weight_version,
            host=options.host.strip("[]"),
            log_path=options.log_dir / f"{spec.engine}.log",
            launch_timeout_s=options.launch_timeout_s,
            port=self._port(spec.engine),
            env={"OMP_NUM_THREADS": str(options.threads), **options.env},
        )
        name = f"host of {spec.incarnation}"
        actor = start_actor(
            EngineHost, options=ActorOptions(name, num_gpus=options.num_gpus, max_concurrency=HOST_CONCURRENCY)
        )
        try:
            timeout_s = options.launch_timeout_s + HOST_START_TIMEOUT_S
            hosted: HostedEngine = await actor.call("start", request, timeout_s=timeout_s)
        except (ActorDied, WaitTimeout) as error:
            await _abandon(actor)
            raise LaunchFailed(f"{spec.engine}: {error}", engine=spec.engine) from error
        except BaseException:
            await _abandon(actor)
            raise
        log.info("engine_started", engine=spec.engine, incarnation=spec.incarnation, url=hosted.url, pid=hosted.pid)
        return ServedEngine(spec, hosted, actor, self._client)

    def _port(self, engine: str) -> int | None:
        if engine not in self._ports:
            given = len(self._ports)
            self._ports[engine] = self._options.ports[given] if given < len(self._options.ports) else None
        return self._ports[engine]


class ServedEngine:
    """Implements controllers.ports.Engine: HTTP calls go straight to the server, its life through the host actor."""

    def __init__(self, spec: LaunchSpec, hosted: HostedEngine, actor: HostHandle, client: SGLangClient) -> None:
        self._spec = spec
        self._hosted = hosted
        self._actor = actor
        self._client = client
        self._exit: EngineExit | None = None

    @property
    def engine(self) -> str:
        """The engine's id, the same over its lives."""
        return self._spec.engine

    @property
    def incarnation(self) -> str:
        """The id of this life."""
        return self._spec.incarnation

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return self._hosted.url

    @property
    def pid(self) -> int:
        """Process id of the server on its own node."""
        return self._hosted.pid

    @property
    def host_pid(self) -> int:
        """Process id of its supervisor on the same node."""
        return self._hosted.host_pid

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        size = self._hosted.info.get("tp_size", 1)
        return size if isinstance(size, int) else 1

    async def health(self, timeout_s: float) -> EngineHealth:
        """Probe it."""
        return await self._client.health(self.url, timeout_s)

    async def abort(self, request_id: str) -> None:
        """Abort one request by its exact id."""
        await self._client.abort(self.url, request_id)

    async def abort_all(self) -> None:
        """Abort every request."""
        await self._client.abort_all(self.url)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        await self._client.pause(self.url, mode)

    async def resume(self) -> None:
        """Go on generating."""
        await self._client.resume(self.url)

    async def call_weight_loader(self, loader: str, manifest: bytes, timeout_s: float) -> None:
        """Run the custom weight loader in every rank with `manifest` as its one tensor."""
        encoding = self._hosted.info.get("tensor_encoding")
        payload = encode_manifest(manifest, encoding if isinstance(encoding, str) else None)
        await self._client.update_weights(self.url, loader, [payload] * self.ranks, timeout_s)

    async def set_weight_version(self, label: str) -> None:
        """Set the label of tokens sampled from now on; aborts nothing."""
        await self._client.set_weight_version(self.url, label)

    async def wait_exit(self) -> EngineExit:
        """Return when the process has ended, or its host has, which ends the process."""
        if self._exit is None:
            try:
                ended: EngineExit = await self._actor.call("wait_exit")
            except ActorDied as error:
                ended = EngineExit(None, str(error))
            # `stop` may have heard it first, and then killed the host under this call.
            self._exit = self._exit or ended
        return self._exit

    async def stop(self, grace_s: float) -> None:
        """End the process tree and its host. Idempotent."""
        try:
            if self._exit is None:
                self._exit = await self._actor.call("stop", grace_s, timeout_s=grace_s + ANSWER_MARGIN_S)
        except ActorDied as error:
            self._exit = EngineExit(None, str(error))
        except (InfrastructureError, WaitTimeout, TimeoutError) as error:
            log.warning("engine_host_silent", engine=self.engine, incarnation=self.incarnation, detail=str(error))
        finally:
            self._actor.kill()  # its engine dies with it, also when we are cancelled
            self._client.forget(self.url)


async def _abandon(actor: RemoteActor) -> None:
    """End a host whose launch failed or was cancelled, its engine first."""
    with anyio.CancelScope(shield=True):
        try:
            await actor.call("stop", 0.0, timeout_s=ABANDON_TIMEOUT_S)
        except (InfrastructureError, WaitTimeout, TimeoutError) as error:
            log.debug("host_gone", host=actor.name, detail=str(error))
        finally:
            actor.kill()
