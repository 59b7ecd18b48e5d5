"""The interface of a transport: a driver's end that makes a staged version readable, and a reader in the engine.

A transport sees slots and staging, never an engine or a trainer. One class holds both ends, so one entry point in the
group `miles.weight_sync` adds a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from controllers.errors import ConfigError
from miles.weight_sync.messages import Layout, VersionRecord

if TYPE_CHECKING:
    from miles.weight_sync.ports import RankRunner
    from miles.weight_sync.staging import Staging

GROUP = "miles.weight_sync"
_OWN = {
    "rdt": "miles.weight_sync.transports.rdt:RdtTransport",
    "disk": "miles.weight_sync.transports.disk:DiskTransport",
}


class PullError(Exception):
    """A pull brought nothing that may be used. Staging may have been replaced."""


class TornRead(PullError):
    """The source overwrote the slot while it was read, or holds another version: ask for a fresh grant."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """`folder` is the shared path of transports that write files; None where there is none."""

    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """`name` is unique over the run. A pull ends within `pull_timeout_s`; a READ moves at most `chunk_bytes`;
    memory of READs that timed out is kept up to `quarantine_bytes`, then the agent is destroyed, which fences them."""

    name: str
    layouts: tuple[Layout, ...]
    pull_timeout_s: float
    chunk_bytes: int
    quarantine_bytes: int


class Reader(Protocol):
    """The end in the engine's process. One thread calls it."""

    def connect(self, source: bytes) -> None:
        """Warm up: connections and registrations, so that the first pull costs what later ones do."""

    def pull(self, source: bytes, record: VersionRecord, renew: Callable[[], None]) -> int:
        """Bring the version into staging and return the bytes read. Calls `renew` often.

        Raises TornRead or PullError; never leaves a transfer behind that can still write into the current staging.
        """

    def close(self) -> None:
        """Disconnect cleanly; sources on some networks stay wedged otherwise."""


class Transport(Protocol):
    """The end in the driver."""

    def __init__(self, options: TransportOptions) -> None: ...

    async def open(self, ranks: RankRunner, layouts: Sequence[Layout]) -> None:
        """Prepare every rank; its slots exist already. Raises WeightSyncError."""

    async def publish(self, ranks: RankRunner, record: VersionRecord, slot: int) -> None:
        """Make the staged version readable, before it is committed. Raises PublishFailed."""

    def source(self, record: VersionRecord | None, slot: int) -> bytes:
        """JSON for readers: where this version lies. Without a record: what `connect` needs."""

    async def retire(self, in_use: Collection[int]) -> None:
        """Free what belongs to versions not in `in_use`."""

    async def close(self) -> None:
        """Free everything in the driver. The ranks' ends are closed with their slots."""

    @staticmethod
    def reader(staging: Staging, options: ReaderOptions) -> Reader:
        """The reader's end."""


def find_transport(name: str) -> type[Transport]:
    """The transport called `name`: one of ours, or any in the entry point group. Raises ConfigError for neither."""
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return cast("type[Transport]", getattr(__import__(module, fromlist=[attribute]), attribute))
    found = entry_points(group=GROUP)
    for point in found:
        if point.name == name:
            return cast("type[Transport]", point.load())
    known = sorted({*_OWN, *found.names})
    raise ConfigError(f"weight_sync.transport: no transport is called {name!r}; there are {', '.join(known)}")
