"""Which engine gets the next lease: pure functions over the engines that have a free slot.

Called by LeaseDesk with a non-empty sequence; equal inputs give equal picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """An engine that could take a lease now."""

    @property
    def engine(self) -> str: ...

    @property
    def in_flight(self) -> int:
        """Leases held on its current incarnation."""


C = TypeVar("C", bound=Candidate)


def least_loaded(candidates: Sequence[C]) -> C:
    """The candidate with the fewest leases in flight; the first of equals."""
    return min(candidates, key=_load)


def sticky(key: str, candidates: Sequence[C]) -> C:
    """The same candidate for the same key (rendezvous hashing).

    When engines come or go, only the keys of those engines move.
    """
    return max(candidates, key=lambda candidate: _affinity(key, candidate.engine))


def _load(candidate: Candidate) -> int:
    return candidate.in_flight


def _affinity(key: str, engine: str) -> bytes:
    return blake2b(f"{engine}\0{key}".encode(), digest_size=8).digest()
