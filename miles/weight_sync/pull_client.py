"""NIXL READs into staging, from one thread, with the one rule that keeps a model whole: a READ that may time out never
targets memory that is used again.

Neither releasing the handle nor removing the peer stops the bytes of a READ in flight. So on timeout the handle and
its target go to quarantine, staging is replaced, and they are freed when NIXL reports an end. Over `quarantine_bytes`
the whole agent is destroyed, which does stop them, and one with a new name takes its place.
"""

from __future__ import annotations

import base64
import gc
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from miles.weight_sync.arena import HEADER_FIXED, HEADER_PER_SLOT, MAGIC
from miles.weight_sync.messages import Endpoint
from miles.weight_sync.nixl_link import LinkError, link_errors, open_agent
from miles.weight_sync.plan import Region
from miles.weight_sync.staging import Staging
from miles.weight_sync.transports.base import PullError, TornRead

_SPIN_S = 0.001
_POLL_S = 0.0002
_NUDGE_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Header:
    """A slot header as read."""

    incarnation: int
    words: tuple[int, ...]

    def slot(self, index: int) -> tuple[int, int, int]:
        """(begin, end, layout) of a slot; zeros for one that does not exist."""
        at = HEADER_FIXED + HEADER_PER_SLOT * index
        begin, end, layout = self.words[at : at + HEADER_PER_SLOT] or (0, 0, 0)
        return begin, end, layout


@dataclass(slots=True)
class Quarantined:
    """A READ, and the memory that it may still write. `handle` is None before it is posted."""

    handle: Any
    memory: torch.Tensor


class PullClient:
    """One NIXL agent and its peers. `quarantined_bytes` and `agents_made` are for statistics and tests."""

    def __init__(
        self,
        name: str,
        staging: Staging,
        chunk_bytes: int,
        quarantine_bytes: int,
        make_agent: Callable[[str], Any] = open_agent,
    ) -> None:
        self._make_agent = make_agent
        self._name = name
        self._staging = staging
        self._chunk_bytes = chunk_bytes
        self._quarantine_bytes = quarantine_bytes
        self._quarantine: list[Quarantined] = []
        self._peers: dict[str, str] = {}
        self._registered: dict[int, Any] = {}
        self.agents_made = 0
        self._agent: Any = None
        self._header = torch.zeros(0, dtype=torch.int64)
        self._open()

    @property
    def quarantined_bytes(self) -> int:
        """Memory that unfinished READs hold."""
        return sum(item.memory.nbytes for item in self._quarantine)

    def deadline(self, timeout_s: float) -> float:
        """The moment `timeout_s` from now, on this client's clock."""
        return time.monotonic() + timeout_s

    def read_header(self, endpoint: Endpoint, deadline: float) -> Header:
        """READ a rank's header. Raises TornRead when it is not one, PullError when NIXL or the rank is not there."""
        if self._header.nbytes != endpoint.header_bytes:
            self._header = torch.zeros(endpoint.header_bytes // 8, dtype=torch.int64)
        self._register(self._header)
        local = [(self._header.data_ptr(), endpoint.header_bytes, 0)]
        remote = [(endpoint.header_address, endpoint.header_bytes, 0)]
        self._transfer(endpoint, local, "DRAM", remote, "DRAM", self._header, deadline, _nothing)
        words = tuple(self._header.tolist())
        if words[0] != MAGIC:
            raise TornRead(f"{endpoint.agent} has no slot header at its address")
        return Header(words[1], words)

    def read(
        self,
        endpoint: Endpoint,
        slot: int,
        regions: Sequence[Region],
        deadline: float,
        renew: Callable[[], None],
    ) -> None:
        """READ regions of a slot into staging, in transfers of at most about `chunk_bytes`. Raises PullError."""
        staging = self._staging
        self._register(staging.flat)
        memory = "VRAM" if staging.device.type == "cuda" else "DRAM"
        device = staging.device.index or 0
        base, source = staging.flat.data_ptr(), endpoint.slots[slot]
        for batch in _batches(regions, self._chunk_bytes):
            local = [(base + region.target, region.nbytes, device) for region in batch]
            remote = [(source + region.source, region.nbytes, endpoint.device) for region in batch]
            self._transfer(endpoint, local, memory, remote, endpoint.memory, staging.flat, deadline, renew)
            renew()

    def close(self) -> None:
        """Disconnect from every peer and let the agent go."""
        self._reap()
        for peer in self._peers.values():
            try:
                with link_errors("remove a peer"):
                    self._agent.remove_remote_agent(peer)
            except LinkError:
                continue  # it is gone already
        self._peers.clear()
        self._destroy()

    def _open(self) -> None:
        try:
            self._agent = self._make_agent(f"{self._name}-{uuid.uuid4().hex}")
        except LinkError as error:
            raise PullError(str(error)) from error
        self.agents_made += 1

    def _destroy(self) -> None:
        """Fence everything in flight: with the agent gone nothing can be written any more, and memory may go too."""
        for item in self._quarantine:
            item.handle = None  # it holds the agent
        self._registered.clear()
        self._peers.clear()
        self._agent = None
        gc.collect()
        self._quarantine.clear()

    def _register(self, memory: torch.Tensor) -> None:
        if self._agent is None:  # one could not be made in place of one that was destroyed
            self._open()
        if memory.data_ptr() not in self._registered:
            try:
                with link_errors("register memory"):
                    self._registered[memory.data_ptr()] = self._agent.register_memory([memory])
            except LinkError as error:
                raise PullError(str(error)) from error

    def _peer(self, endpoint: Endpoint) -> str:
        if endpoint.agent not in self._peers:
            with link_errors(f"connect to {endpoint.agent}"):
                added = self._agent.add_remote_agent(base64.b64decode(endpoint.metadata))
            self._peers[endpoint.agent] = added.decode() if isinstance(added, bytes) else added
        return self._peers[endpoint.agent]

    def _transfer(
        self,
        endpoint: Endpoint,
        local: list[tuple[int, int, int]],
        local_memory: str,
        remote: list[tuple[int, int, int]],
        remote_memory: str,
        target: torch.Tensor,
        deadline: float,
        renew: Callable[[], None],
    ) -> None:
        """One READ, to its end or to the deadline. Whatever ends otherwise than DONE takes `target` out of use."""
        read, failure = Quarantined(None, target), None
        try:
            with link_errors(f"READ from {endpoint.agent}"):
                self._finish(read, endpoint, (local, local_memory), (remote, remote_memory), deadline, renew)
        except LinkError as error:
            failure = error
            _drop_frames(failure)
        if failure is not None:
            self._set_aside(read)
            raise PullError(str(failure)) from failure

    def _finish(
        self,
        read: Quarantined,
        endpoint: Endpoint,
        local: tuple[list[tuple[int, int, int]], str],
        remote: tuple[list[tuple[int, int, int]], str],
        deadline: float,
        renew: Callable[[], None],
    ) -> None:
        """Post a READ and see it to its end. Raises LinkError for any but DONE, and at the deadline."""
        agent = self._agent
        peer = self._peer(endpoint)
        read.handle = agent.initialize_xfer("READ", agent.get_xfer_descs(*local), agent.get_xfer_descs(*remote), peer)
        state = agent.transfer(read.handle)
        posted = nudge_at = time.monotonic()
        while state == "PROC":
            now = time.monotonic()
            if now >= nudge_at:
                # Where the network needs the source's help (TCP, a new connection): its pump speeds up.
                agent.send_notif(peer, b"reading")
                nudge_at = now + _NUDGE_EVERY_S
            if now > deadline:
                raise LinkError(f"a READ from {endpoint.agent} has not ended by its deadline")
            renew()
            time.sleep(0 if now - posted < _SPIN_S else _POLL_S)
            state = agent.check_xfer_state(read.handle)
        if state != "DONE":
            raise LinkError(f"a READ from {endpoint.agent} ended as {state}")
        agent.release_xfer_handle(read.handle)

    def _set_aside(self, read: Quarantined) -> None:
        """Take the target of a READ that did not end well out of use, within the byte budget."""
        self._reap()
        if read.handle is not None:
            self._quarantine.append(read)
            if read.memory is self._header:
                self._header = torch.zeros_like(read.memory)
            else:
                self._staging.replace()
        if self.quarantined_bytes > self._quarantine_bytes:
            self._destroy()
            self._open()

    def _reap(self) -> None:
        """Let go of quarantined READs that have come to an end."""
        pending: list[Quarantined] = []
        for item in self._quarantine:
            try:
                with link_errors("poll a quarantined READ"):
                    ended = self._agent.check_xfer_state(item.handle) != "PROC"
            except LinkError as error:
                ended = error.disconnected
            if ended:
                self._forget(item)
            else:
                pending.append(item)
        self._quarantine = pending

    def _forget(self, item: Quarantined) -> None:
        try:
            with link_errors("release a READ"):
                self._agent.release_xfer_handle(item.handle)
                registered = self._registered.pop(item.memory.data_ptr(), None)
                if registered is not None:
                    self._agent.deregister_memory(registered)
        except LinkError:
            self._registered.pop(item.memory.data_ptr(), None)  # gone with its peer


def _drop_frames(error: BaseException | None) -> None:
    """Let go of the frames of an error and its causes: they hold the agent, which then would outlive `_destroy`."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _nothing() -> None:
    """Renew nothing."""


def _batches(regions: Sequence[Region], chunk_bytes: int) -> list[list[Region]]:
    """Cut regions so that no transfer moves much more than `chunk_bytes`: deadlines and leases are per transfer."""
    batches: list[list[Region]] = [[]]
    room = chunk_bytes
    for region in regions:
        done = 0
        while done < region.nbytes:
            if room <= 0:
                batches.append([])
                room = chunk_bytes
            size = min(region.nbytes - done, room)
            batches[-1].append(Region(region.rank, region.source + done, region.target + done, size))
            done += size
            room -= size
    return [batch for batch in batches if batch]
