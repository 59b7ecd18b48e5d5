"""Every message of weight sync, as msgspec structs: what goes over HTTP, into the weight loader and to ranks.

JSON, never pickled between processes that do not trust one another. A union is told apart by its tag; every message
that opens a conversation carries PROTOCOL, and another number is refused by name. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

PROTOCOL = 1
ALIGN = 256
"""Every tensor starts at a multiple of this in a slot, so that words, descriptors and vector loads are aligned."""

Box = tuple[tuple[int, int], ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """One box of one global tensor in a slot: contiguous, row-major, at `offset`. `box` is (start, length) a dim."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """Where each box of one rank lies in a slot. Fixed for an incarnation; another layout has another `layout_id`."""

    layout_id: str
    rank: int
    entries: tuple[TensorEntry, ...]
    slot_bytes: int
    n_slots: int

    @property
    def crc(self) -> int:
        """The layout id as a non-negative 63-bit number, for the header of a slot."""
        return int(self.layout_id[:16], 16) >> 1


def make_layout(rank: int, n_slots: int, boxes: Iterable[tuple[str, str, tuple[int, ...], Box, int]]) -> Layout:
    """Lay out (name, dtype, global_shape, box, nbytes) one after the other. Raises ValueError for a box given twice."""
    entries: list[TensorEntry] = []
    offset = 0
    seen: set[tuple[str, Box]] = set()
    for name, dtype, global_shape, box, nbytes in boxes:
        if (name, box) in seen:
            raise ValueError(f"rank {rank} gives the box {box} of {name} twice")
        seen.add((name, box))
        entries.append(TensorEntry(name, dtype, global_shape, box, offset, nbytes))
        offset += -(-nbytes // ALIGN) * ALIGN
    layout_id = hashlib.sha256(msgspec.json.encode(entries)).hexdigest()
    return Layout(layout_id, rank, tuple(entries), max(offset, ALIGN), n_slots)


class Endpoint(msgspec.Struct, frozen=True):
    """Where one trainer rank's slots can be READ: its NIXL agent, addresses, and the memory they are in.

    The header is always host memory. `incarnation` is a random number that the header repeats.
    """

    agent: str
    metadata: str
    slots: tuple[int, ...]
    header_address: int
    header_bytes: int
    memory: str
    device: int
    incarnation: int


class VersionRecord(msgspec.Struct, frozen=True):
    """A committed version, as a reader sees it. `digest` is what the bytes must add up to."""

    version: int
    step: int
    lineage: int
    digest: str


# Commands to the weight loader, in its one tensor `manifest`.


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start the pull agent of this incarnation; harmless when it runs already. `source` is what it warms up with."""

    protocol: int
    engine: str
    incarnation: str
    control_url: str
    token: str
    layouts: tuple[Layout, ...]
    transport: str
    source: msgspec.Raw
    pull_timeout_s: float
    chunk_bytes: int
    quarantine_bytes: int


class Install(msgspec.Struct, frozen=True, tag="install"):
    """Copy the staged `version` into the live parameters."""

    protocol: int
    incarnation: str
    version: int


Command = Start | Install

# Requests of an agent, and the answers.


class Ask(msgspec.Struct, frozen=True):
    """POST /next (waits for work, 204 when there is none), /acquire (a fresh grant after a failed read)."""

    protocol: int
    incarnation: str
    rank: int


class Renew(msgspec.Struct, frozen=True):
    """POST /renew: keep a lease while reading. Answered 200, or 409 when it is gone."""

    protocol: int
    incarnation: str
    rank: int
    lease: str


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Bring `record` into staging, over `transport`; `source` is that transport's own. The lease keeps it in place."""

    record: VersionRecord
    transport: str
    source: msgspec.Raw
    lease: str
    lease_ttl_s: float


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """Digest the live parameters, which should hold `version`, and vote Audited."""

    version: int


Job = Pull | Audit


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of one incarnation says of itself. POST /vote; 410 means that it is no longer wanted."""

    protocol: int = PROTOCOL
    incarnation: str
    rank: int


class Ready(Vote, frozen=True, kw_only=True, tag="ready"):
    """The agent is up, staging is allocated, and every parameter has its place in it."""


class Staged(Vote, frozen=True, kw_only=True, tag="staged"):
    """Verified bytes of `version` lie in staging."""

    version: int
    digest: str
    lease: str
    nbytes: int
    pull_s: float


class Installed(Vote, frozen=True, kw_only=True, tag="installed"):
    """The live parameters were written from staging, which holds `digest`."""

    version: int
    digest: str
    install_s: float


class Audited(Vote, frozen=True, kw_only=True, tag="audited"):
    """The digest of the live parameters themselves."""

    version: int
    digest: str


class PullFailed(Vote, frozen=True, kw_only=True, tag="pull_failed"):
    """Nothing was staged; the live parameters are as they were."""

    version: int
    lease: str
    reason: str


class Failed(Vote, frozen=True, kw_only=True, tag="failed"):
    """The agent cannot go on, or an install failed: the live parameters cannot be trusted."""

    reason: str


def encode(message: msgspec.Struct) -> bytes:
    """As JSON."""
    return msgspec.json.encode(message)


AnyVote = Ready | Staged | Installed | Audited | PullFailed | Failed
