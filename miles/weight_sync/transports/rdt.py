"""The `rdt` transport: engines READ the trainer's slots through NIXL, one-sided, without the trainer's step loop.

Safety is the seqlock in the slot's header, read before and after; a lease only keeps the slot from being overwritten
while that can be waited for. So a reader that outlives its lease gets TornRead, never torn weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from controllers.errors import WeightSyncError
from miles.weight_sync.messages import Endpoint, Layout, VersionRecord
from miles.weight_sync.plan import Region, plan_reads
from miles.weight_sync.transports.base import ReaderOptions, TornRead, TransportOptions

if TYPE_CHECKING:
    from miles.weight_sync.ports import RankRunner, RankTensors
    from miles.weight_sync.pull_client import PullClient
    from miles.weight_sync.staging import Staging


class Exposed(msgspec.Struct, frozen=True):
    """A rank's answer."""

    rank: int
    endpoint: Endpoint | None
    error: str | None = None


class RdtSource(msgspec.Struct, frozen=True):
    """Where a version lies: the same slot of every rank, in rank order."""

    slot: int
    endpoints: tuple[Endpoint, ...]


def expose(context: RankTensors) -> Exposed:
    """Register this rank's slots and start its pump (runs in the rank)."""
    from miles.weight_sync.nixl_source import NixlSource
    from miles.weight_sync.publisher import guarded, publisher_of

    def work() -> Exposed:
        publisher = publisher_of(context)
        source = NixlSource(publisher.arena)
        publisher.attached["rdt"] = source
        return Exposed(context.rank, source.endpoint)

    return guarded(work, lambda error: Exposed(context.rank, None, error))


class RdtTransport:
    """The driver's end: it only knows where the slots are."""

    def __init__(self, options: TransportOptions) -> None:
        self._endpoints: tuple[Endpoint, ...] = ()

    async def open(self, ranks: RankRunner, layouts: Sequence[Layout]) -> None:
        endpoints: list[Endpoint] = []
        for answer in await ranks.on_each_rank(expose):
            if answer.endpoint is None:
                raise WeightSyncError(f"trainer rank {answer.rank} cannot serve weights: {answer.error}")
            endpoints.append(answer.endpoint)
        self._endpoints = tuple(endpoints)

    async def publish(self, ranks: RankRunner, record: VersionRecord, slot: int) -> None:
        """Nothing: a staged slot can be read as it is."""

    def source(self, record: VersionRecord | None, slot: int) -> bytes:
        return msgspec.json.encode(RdtSource(slot, self._endpoints))

    async def retire(self, in_use: Collection[int]) -> None:
        """Nothing: a slot is free when the service says so."""

    async def close(self) -> None:
        self._endpoints = ()

    @staticmethod
    def reader(staging: Staging, options: ReaderOptions) -> RdtReader:
        from miles.weight_sync.pull_client import PullClient

        client = PullClient(options.name, staging, options.chunk_bytes, options.quarantine_bytes)
        return RdtReader(client, staging, options)


class RdtReader:
    """The engine's end."""

    def __init__(self, client: PullClient, staging: Staging, options: ReaderOptions) -> None:
        self._client = client
        self._layouts = options.layouts
        self._timeout_s = options.pull_timeout_s
        self._plan: dict[int, list[Region]] = {layout.rank: [] for layout in options.layouts}
        for region in plan_reads(options.layouts, staging.layout):
            self._plan[region.rank].append(region)

    def connect(self, source: bytes) -> None:
        for endpoint in msgspec.json.decode(source, type=RdtSource).endpoints:
            self._client.read_header(endpoint, self._client.deadline(self._timeout_s))

    def pull(self, source: bytes, record: VersionRecord, renew: Callable[[], None]) -> int:
        where = msgspec.json.decode(source, type=RdtSource)
        deadline = self._client.deadline(self._timeout_s)
        sources = list(zip(self._layouts, where.endpoints, strict=True))
        self._check_headers(sources, where.slot, record.version, deadline)
        nbytes = 0
        for layout, endpoint in sources:
            regions = self._plan[layout.rank]
            self._client.read(endpoint, where.slot, regions, deadline, renew)
            nbytes += sum(region.nbytes for region in regions)
        self._check_headers(sources, where.slot, record.version, deadline)
        return nbytes

    def close(self) -> None:
        self._client.close()

    def _check_headers(
        self, sources: Sequence[tuple[Layout, Endpoint]], slot: int, version: int, deadline: float
    ) -> None:
        """Every rank's slot holds exactly `version`, whole, in the layout we planned for. Raises TornRead."""
        for layout, endpoint in sources:
            header = self._client.read_header(endpoint, deadline)
            begin, end, crc = header.slot(slot)
            if header.incarnation != endpoint.incarnation or (begin, end, crc) != (version, version, layout.crc):
                raise TornRead(
                    f"slot {slot} of trainer rank {layout.rank} holds {begin}..{end}, not version {version}"
                )
