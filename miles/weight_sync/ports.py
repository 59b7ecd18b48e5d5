"""What weight sync needs from outside, as Protocols: the trainer's ranks and the controller.

They are structural on purpose: any trainer that can run a function in each of its ranks gets weight sync, and the
plugin knows no class of the trainer or of the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from controllers.event_bus import EventBus
from controllers.ports import Engine
from controllers.weight_versions import WeightVersion

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


class Shard(Protocol):
    """One box of one global tensor: `box` is (start, length) per dimension, `tensor` a live view of `[length, ...]`."""

    @property
    def name(self) -> str: ...

    @property
    def global_shape(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def tensor(self) -> torch.Tensor: ...


class RankTensors(Protocol):
    """What a function sent to every rank sees there."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def plugins(self) -> dict[str, Any]: ...

    def shards(self) -> Iterator[Shard]: ...


class RankRunner(Protocol):
    """Runs an importable function in every rank's process; results in rank order. Raises MilesError without a rank."""

    @property
    def incarnation(self) -> int:
        """Rises at the moment rank processes are lost, before a call that lost them raises. A later call reaches
        others in their place, which know nothing of what was done in the lost ones."""

    @property
    def steps_done(self) -> int:
        """The optimizer step whose weights the ranks hold."""

    async def on_each_rank(
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...


class EngineRecord(Protocol):
    """One engine in a snapshot of the controller."""

    @property
    def engine(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def state(self) -> str: ...


class UpdateHandle(Protocol):
    """The body of `Controller.updating`: an engine that is out of service until `prove`."""

    @property
    def engine(self) -> Engine: ...

    def prove(self) -> None: ...


class Controller(Protocol):
    """What weight sync asks of the InferenceController. Calls about an ended incarnation raise StaleIncarnation."""

    @property
    def bus(self) -> EventBus: ...

    def snapshot(self) -> Sequence[EngineRecord]: ...

    def reserve_version(self) -> int: ...

    def commit_version(self, version: WeightVersion) -> None: ...

    def engine(self, engine: str, incarnation: str) -> Engine: ...

    def admit(self, engine: str, incarnation: str, version: WeightVersion) -> None: ...

    def updating(
        self, engine: str, incarnation: str, target: WeightVersion
    ) -> AbstractAsyncContextManager[UpdateHandle]: ...

    def fail(self, engine: str, incarnation: str, reason: str) -> None: ...
