"""A NIXL agent in memory: READs are plain copies between real addresses, and end when a script says so.

    agent.states.append(["PROC", "DONE"])     # the states of the next READ, in order; the last one stays
    agent.raises.append(SomeError())          # the next READ raises this on posting
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import Any

Rows = list[tuple[int, int, int]]


@dataclass
class FakeRead:
    """One READ. It has landed once a state other than PROC was given out. Holds its agent, as NIXL's handles do."""

    agent: FakeNixlAgent
    local: Rows
    remote: Rows
    states: deque[str]

    def land(self) -> None:
        for (target, size, _), (source, _, _) in zip(self.local, self.remote, strict=True):
            ctypes.memmove(target, source, size)


@dataclass
class FakeNixlAgent:
    """Stands in for nixl_agent where a PullClient is given `make_agent`."""

    name: str
    states: deque[list[str]] = field(default_factory=deque)
    raises: deque[Exception] = field(default_factory=deque)
    registered: list[int] = field(default_factory=list)
    released: int = 0
    nudges: int = 0
    peers: list[str] = field(default_factory=list)

    def register_memory(self, tensors: list[Any]) -> int:
        self.registered.append(tensors[0].data_ptr())
        return int(tensors[0].data_ptr())

    def deregister_memory(self, address: int) -> None:
        self.registered.remove(address)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, rows: Rows, memory: str) -> Rows:
        return rows

    def initialize_xfer(self, operation: str, local: Rows, remote: Rows, peer: str) -> FakeRead:
        return FakeRead(self, local, remote, deque(self.states.popleft() if self.states else ["DONE"]))

    def transfer(self, read: FakeRead) -> str:
        if self.raises:
            raise self.raises.popleft()
        return self.check_xfer_state(read)

    def check_xfer_state(self, read: FakeRead) -> str:
        state = read.states.popleft() if len(read.states) > 1 else read.states[0]
        if state == "DONE":
            read.land()
        return state

    def send_notif(self, peer: str, message: bytes) -> None:
        self.nudges += 1

    def release_xfer_handle(self, read: FakeRead) -> None:
        self.released += 1
