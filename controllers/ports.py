"""What the control plane needs from outside, as Protocols. `miles.engines` implements them; `tests/fakes` too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """One answer to a probe. `tokens_generated` only rises: while it advances the engine is alive."""

    tokens_generated: int
    running: int
    weight_version: str


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How an engine's process ended. `returncode` is None where it cannot be known (its host died)."""

    returncode: int | None
    detail: str


class Engine(Protocol):
    """One incarnation of one engine: a running server, reached over its HTTP API.

    Every call raises EngineUnreachable when there is no answer and EngineRejected when the answer refuses.
    """

    @property
    def engine(self) -> str:
        """The engine's id, the same over its lives (`engine-0`)."""

    @property
    def incarnation(self) -> str:
        """The id of this life, unique over the run."""

    @property
    def url(self) -> str:
        """`http://host:port`, no trailing slash."""

    @property
    def pid(self) -> int:
        """Process id of the server on its own node; 0 for an external engine."""

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks, each of which votes on its own."""

    async def health(self, timeout_s: float) -> EngineHealth:
        """Probe it. Never queued behind generation.

        An error may carry `tokens_generated` (an id of the exception) where the count could be read all the same:
        an engine that refuses probes but makes progress is busy, not dead.
        """

    async def abort(self, request_id: str) -> None:
        """Abort one request by its exact id; unknown ids are ignored."""

    async def abort_all(self) -> None:
        """Abort every running and queued request."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. Returns when no step is running."""

    async def resume(self) -> None:
        """Go on generating; harmless when not paused."""

    async def call_weight_loader(self, loader: str, manifest: bytes, timeout_s: float) -> None:
        """Run the custom weight loader `loader` (dotted path) in every rank with one uint8 tensor, `manifest`.

        A return proves nothing (see the votes of the weight sync service).
        """

    async def set_weight_version(self, label: str) -> None:
        """Set the label of tokens sampled from now on. Aborts nothing."""

    async def wait_exit(self) -> EngineExit:
        """Return when the process has ended: an event, not a poll. For an external engine it never returns."""

    async def stop(self, grace_s: float) -> None:
        """End the process tree: SIGTERM, then SIGKILL after `grace_s`. Idempotent; never raises for a dead one."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a launcher needs to start one incarnation. `weight_version` is its first label, `incarnation:none`."""

    engine: str
    incarnation: str
    weight_version: str


class EngineLauncher(Protocol):
    """Starts incarnations."""

    async def launch(self, spec: LaunchSpec) -> Engine:
        """Start one; return when its server answers. Raises LaunchFailed. Cancelling leaves no process behind."""
