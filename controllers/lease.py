"""The right to generate on one incarnation of an engine, and the word that takes it back.

Invariant: a lease gives its slot back once, to the incarnation it came from, however late and however often it is
released; a later life of the same engine is never touched by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from controllers.weight_versions import WeightVersion


class Revocation:
    """Set once for all leases of an incarnation when it stops serving.

    `deadline` (event loop clock, seconds) is when the controller aborts what still runs. It may be brought forward
    (an engine that dies while it drains), never put off.
    """

    __slots__ = ("_event", "deadline", "reason")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.reason: str | None = None
        self.deadline: float | None = None

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when the lease has been revoked."""
        await self._event.wait()

    def set(self, reason: str, deadline: float) -> None:
        """Called by the fleet alone."""
        if self.deadline is None or deadline < self.deadline:
            self.reason, self.deadline = reason, deadline
        self._event.set()


@dataclass(slots=True, eq=False)
class Lease:
    """One slot on one incarnation. `version` is what it served when the lease was granted.

    Made by LeaseDesk. `release` is called by the `async with` that gave the lease.
    """

    engine: str
    incarnation: str
    url: str
    version: WeightVersion
    revoked: Revocation
    _give_back: Callable[[], None] | None = field(repr=False)
    _note_tokens: Callable[[int], None] = field(repr=False)

    @property
    def cache_salt(self) -> str:
        """Keeps prefix KV of older weights, and of an earlier life, from being reused by a new request."""
        return f"{self.incarnation}:{self.version.number}"

    def note_tokens(self, count: int) -> None:
        """Tell that `count` tokens came from the engine. Progress counts as alive when a health probe fails."""
        self._note_tokens(count)

    def release(self) -> None:
        """Give the slot back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
