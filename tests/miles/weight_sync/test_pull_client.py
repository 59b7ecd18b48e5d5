"""The rule of the pull client: memory of a READ that has not ended is never used again, within a byte budget."""

from __future__ import annotations

import base64
import gc
import time
import weakref
from collections import deque

import pytest
import torch

from miles.weight_sync.arena import SlotArena
from miles.weight_sync.messages import Endpoint
from miles.weight_sync.nixl_link import LinkError
from miles.weight_sync.plan import Region, full_layout
from miles.weight_sync.pull_client import PullClient, _batches
from miles.weight_sync.staging import Staging
from miles.weight_sync.transports.base import PullError, TornRead
from tests.fakes.nixl_agent import FakeNixlAgent
from tests.miles.weight_sync.harness import LocalRanks


class Bench:
    """An arena that holds version 1 in slot 0, and a client over fake agents."""

    def __init__(self, quarantine_bytes: int = 1 << 30) -> None:
        ranks = LocalRanks()
        ranks.step(1)
        self.arena = SlotArena(0, ranks.ranks[0].shards(), 2)
        self.arena.stage(0, 1, ranks.ranks[0].shards())
        self.staging = Staging(full_layout([self.arena.layout]), torch.device("cpu"))
        self.agents: list[FakeNixlAgent] = []
        self.unavailable = False
        self.client = PullClient("reader", self.staging, 1 << 20, quarantine_bytes, self.make_agent)
        self.endpoint = Endpoint(
            agent="trainer-0",
            metadata=base64.b64encode(b"trainer-0").decode(),
            slots=(self.arena.slot_address(0), self.arena.slot_address(1)),
            header_address=self.arena.header.data_ptr(),
            header_bytes=self.arena.header.nbytes,
            memory="DRAM",
            device=0,
            incarnation=self.arena.incarnation,
        )
        self.renewed = 0

    def make_agent(self, name: str) -> FakeNixlAgent:
        if self.unavailable:
            raise LinkError("create an agent: no such backend")
        self.agents.append(FakeNixlAgent(name))
        return self.agents[-1]

    def read(self, timeout_s: float = 5.0) -> None:
        size = self.staging.layout.slot_bytes
        self.client.read(self.endpoint, 0, [Region(0, 0, 0, size)], self.client.deadline(timeout_s), self.renew)

    def renew(self) -> None:
        self.renewed += 1

    def whole(self) -> bool:
        return torch.equal(self.staging.flat, self.arena.slot(0))


def test_a_read_lands_in_staging_and_renews_while_it_waits() -> None:
    b = Bench()
    b.agents[0].states.append(["PROC", "PROC", "DONE"])
    b.read()
    assert b.whole()
    assert b.renewed == 3
    assert b.agents[0].nudges == 1
    header = b.client.read_header(b.endpoint, b.client.deadline(5.0))
    assert (header.incarnation, header.slot(0)) == (b.arena.incarnation, (1, 1, b.arena.layout.crc))


def test_a_timed_out_read_keeps_its_memory_and_staging_is_replaced() -> None:
    """Late bytes must not reach staging: fails if `_staging.replace()` is dropped in PullClient._set_aside."""
    b = Bench()
    b.agents[0].states.append(["PROC"])
    old = b.staging.flat
    with pytest.raises(PullError, match="deadline"):
        b.read(timeout_s=0.0)
    assert b.staging.flat.data_ptr() != old.data_ptr()
    assert b.client.quarantined_bytes == old.nbytes
    old.fill_(77)  # the READ goes on
    b.read()
    assert b.whole()
    assert b.client.agents_made == 1


def test_quarantined_memory_is_freed_when_its_read_ends() -> None:
    b = Bench()
    states = deque(["PROC"])
    b.agents[0].states.append(["PROC"])
    with pytest.raises(PullError):
        b.read(timeout_s=0.0)
    quarantined = b.client._quarantine[0]
    quarantined.handle.states = states
    b.client._reap()
    assert b.client.quarantined_bytes > 0
    states.append("DONE")
    b.client._reap()
    b.client._reap()
    assert b.client.quarantined_bytes == 0
    assert quarantined.memory.data_ptr() not in b.agents[0].registered


def test_over_its_budget_the_agent_is_destroyed_and_another_name_takes_its_place() -> None:
    """Fails if the check of `quarantine_bytes` is dropped: memory would grow without bound."""
    b = Bench(quarantine_bytes=0)
    b.agents[0].states.append(["PROC"])
    with pytest.raises(PullError):
        b.read(timeout_s=0.0)
    assert b.client.agents_made == 2
    assert b.client.quarantined_bytes == 0
    assert b.agents[0].name != b.agents[1].name
    b.read()
    assert b.whole()
    assert b.agents[1].peers == ["trainer-0"]


def test_quarantined_memory_outlives_the_agent_that_may_write_it() -> None:
    """Fails if PullClient._destroy clears the quarantine first, leaves handles, or runs while error frames are held."""
    b = Bench(quarantine_bytes=0)
    b.agents[0].states.append(["PROC"])
    memory = weakref.ref(b.staging.flat)
    seen: list[bool] = []
    weakref.finalize(b.agents.pop(), lambda: seen.append(memory() is not None))
    with pytest.raises(PullError):
        b.read(timeout_s=0.0)
    assert seen == [True]
    assert b.client.agents_made == 2
    gc.collect()
    assert memory() is None


def test_without_nixl_a_pull_fails_and_a_later_one_tries_again() -> None:
    """The disk fallback follows PullErrors. Fails if LinkError is let through by PullClient._open or _register."""
    b = Bench(quarantine_bytes=0)
    b.unavailable = True
    with pytest.raises(PullError, match="no such backend"):
        PullClient("other", b.staging, 1 << 20, 0, b.make_agent)
    b.agents[0].states.append(["PROC"])
    for _ in range(2):
        with pytest.raises(PullError, match="no such backend"):
            b.read(timeout_s=0.0)
    b.unavailable = False
    b.read()
    assert b.whole()


def test_memory_that_cannot_be_registered_is_a_failed_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Bench()

    def refuse(tensors: list[torch.Tensor]) -> None:
        raise type("nixlBackendError", (Exception,), {"__module__": "nixl_cu12._bindings"})("locked memory limit")

    monkeypatch.setattr(b.agents[0], "register_memory", refuse)
    with pytest.raises(PullError, match="locked memory limit"):
        b.read()


def test_a_read_that_ends_in_an_error_is_a_failed_pull() -> None:
    b = Bench()
    b.agents[0].states.append(["ERR"])
    old = b.staging.flat.data_ptr()
    with pytest.raises(PullError, match="ended as ERR"):
        b.read()
    assert b.staging.flat.data_ptr() != old
    error = type("nixlRemoteDisconnectError", (Exception,), {"__module__": "nixl_cu12._bindings"})
    b.agents[0].raises.append(error("gone"))
    with pytest.raises(PullError, match="nixlRemoteDisconnectError") as caught:
        b.read()
    assert isinstance(caught.value.__cause__, LinkError)
    assert caught.value.__cause__.disconnected
    b.agents[0].raises.append(ZeroDivisionError())  # not NIXL's: a bug passes as it is
    with pytest.raises(ZeroDivisionError):
        b.read()


def test_a_header_that_is_none_is_torn() -> None:
    b = Bench()
    b.arena.header[0] = 0
    with pytest.raises(TornRead, match="no slot header"):
        b.client.read_header(b.endpoint, time.monotonic() + 5)


def test_closing_disconnects_from_every_peer() -> None:
    b = Bench()
    b.read()
    b.client.close()
    assert b.agents[0].peers == []


def test_transfers_are_cut_to_size() -> None:
    regions = [Region(0, 0, 1000, 10), Region(0, 50, 2000, 25)]
    batches = _batches(regions, 16)
    assert [sum(region.nbytes for region in batch) for batch in batches] == [16, 16, 3]
    assert batches[1] == [Region(0, 56, 2006, 16)]
    assert _batches([], 16) == []
