"""Who reads which slot. A lease gives a reader time; the slot's header, not the lease, keeps it from torn bytes.

Invariant: `free_slot` never returns the committed slot. A lease ends by release, by expiry, or by being revoked when a
publication has waited for its slot until a deadline; its holder finds out by the header or by a refused renewal.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import anyio


@dataclass(slots=True)
class SlotLease:
    """`slot` is None for a reader of something other than slots (a folder). Times are of the table's clock."""

    lease: str
    holder: tuple[str, int]
    version: int
    slot: int | None
    granted: float
    expires: float


class LeaseTable:
    """Leases on the versions that are being read. A holder (incarnation, rank) has one at a time."""

    def __init__(self, n_slots: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.n_slots = n_slots
        self.ttl_s = ttl_s
        self.expired = 0
        self.revoked = 0
        self._clock = clock
        self._leases: dict[str, SlotLease] = {}
        self._changed = anyio.Event()

    def grant(self, holder: tuple[str, int], version: int, slot: int | None) -> SlotLease:
        """A new lease in place of any that the holder has."""
        self.release_holder(holder)
        now = self._clock()
        lease = SlotLease(secrets.token_hex(8), holder, version, slot, now, now + self.ttl_s)
        self._leases[lease.lease] = lease
        return lease

    def renew(self, lease: str) -> bool:
        """Push the expiry out. False when the lease is gone."""
        self._expire()
        found = self._leases.get(lease)
        if found is None:
            return False
        found.expires = self._clock() + self.ttl_s
        return True

    def release(self, lease: str) -> None:
        """End a lease; harmless when it has ended."""
        if self._leases.pop(lease, None) is not None:
            self._wake()

    def release_holder(self, holder: tuple[str, int]) -> None:
        """End what one reader holds."""
        for lease in [lease.lease for lease in self._leases.values() if lease.holder == holder]:
            self.release(lease)

    def release_slots(self) -> None:
        """End every lease on a slot: the slots themselves are gone."""
        for lease in [lease.lease for lease in self._leases.values() if lease.slot is not None]:
            self.release(lease)

    def versions(self) -> set[int]:
        """Versions that somebody is reading."""
        self._expire()
        return {lease.version for lease in self._leases.values()}

    def active(self) -> int:
        """How many leases there are."""
        self._expire()
        return len(self._leases)

    async def free_slot(self, committed: int | None, timeout_s: float) -> int:
        """A slot that is neither committed nor leased. After `timeout_s` the one whose oldest lease is oldest is taken:
        its leases are revoked."""
        with anyio.move_on_after(timeout_s):
            while True:
                slot = self._free(committed)
                if slot is not None:
                    return slot
                self._changed = anyio.Event()
                with anyio.move_on_after(self._until_next_expiry()):
                    await self._changed.wait()
        slot = self._free(committed)  # one may have come free in the very turn in which the time was up
        return self._revoke_slowest(committed) if slot is None else slot

    def _free(self, committed: int | None) -> int | None:
        self._expire()
        taken = {lease.slot for lease in self._leases.values()}
        return next((slot for slot in range(self.n_slots) if slot != committed and slot not in taken), None)

    def _revoke_slowest(self, committed: int | None) -> int:
        held = [lease for lease in self._leases.values() if lease.slot is not None and lease.slot != committed]
        slowest = min(held, key=lambda lease: lease.granted)
        for lease in held:
            if lease.slot == slowest.slot:
                self.revoked += 1
                self.release(lease.lease)
        assert slowest.slot is not None
        return slowest.slot

    def _until_next_expiry(self) -> float:
        return max(0.0, min(lease.expires for lease in self._leases.values()) - self._clock())

    def _expire(self) -> None:
        now = self._clock()
        for lease in [lease for lease in self._leases.values() if lease.expires <= now]:
            self.expired += 1
            self.release(lease.lease)

    def _wake(self) -> None:
        self._changed.set()
