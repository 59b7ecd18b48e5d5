"""What runs in a trainer rank's process, called through `on_each_rank`: slots, and the transports' ends there.

Nothing here raises into the trainer: every answer carries `error`, so that one failing rank leaves the others' answers
readable. The trainer waits for the copy alone; digests of large slots are computed on a thread while it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from miles.weight_sync.arena import SlotArena
from miles.weight_sync.messages import Layout
from miles.weight_sync.ports import RankTensors

PLUGIN = "miles.weight_sync"
INLINE_DIGEST_BYTES = 64 << 20

T = TypeVar("T")


class Opened(msgspec.Struct, frozen=True):
    """A rank's slots are ready."""

    rank: int
    layout: Layout | None
    error: str | None = None


class StageReport(msgspec.Struct, frozen=True):
    """A rank has staged a version. `sums` is None where the digest still runs: ask `slot_sums`."""

    rank: int
    nbytes: int = 0
    copy_s: float = 0.0
    sums: dict[str, int] | None = None
    error: str | None = None


class Done(msgspec.Struct, frozen=True):
    """A rank has done something that has no answer of its own."""

    rank: int
    error: str | None = None


class WeightPublisher:
    """One rank's slots, and whatever the transports keep beside them (closed in reverse order)."""

    def __init__(self, context: RankTensors, n_slots: int) -> None:
        self.arena = SlotArena(context.rank, context.shards(), n_slots)
        self.attached: dict[str, Closable] = {}
        self._owned: list[int] = []
        self._digest: tuple[int, Future[dict[str, int]]] | None = None

    def stage(self, context: RankTensors, slot: int, version: int, owned: list[int]) -> StageReport:
        """Copy, and digest at once where that is cheap."""
        self._owned = owned
        start = time.perf_counter()
        self.arena.stage(slot, version, context.shards())
        copy_s = time.perf_counter() - start
        for attached in self.attached.values():
            attached.staged()
        nbytes = self.arena.layout.slot_bytes
        if nbytes <= INLINE_DIGEST_BYTES:
            return StageReport(context.rank, nbytes, copy_s, self.arena.sums(slot, owned))
        future: Future[dict[str, int]] = Future()
        self._digest = (version, future)
        threading.Thread(target=self._compute, args=(future, slot), name="miles-digest", daemon=True).start()
        return StageReport(context.rank, nbytes, copy_s)

    def sums(self, version: int, timeout_s: float) -> dict[str, int]:
        """Wait for the digest of the version staged last."""
        if self._digest is None or self._digest[0] != version:
            raise ValueError(f"version {version} is not being digested")
        return self._digest[1].result(timeout_s)

    def close(self) -> None:
        """Stop serving."""
        while self.attached:
            self.attached.popitem()[1].close()

    def _compute(self, future: Future[dict[str, int]], slot: int) -> None:
        try:
            future.set_result(self.arena.sums(slot, self._owned))
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error)


class Closable:
    """What a transport keeps in a rank."""

    def staged(self) -> None:
        """A version has just been staged, so readers will come."""

    def close(self) -> None:
        """Let go of everything."""


def publisher_of(context: RankTensors) -> WeightPublisher:
    """The rank's publisher. Raises KeyError before `open_publisher`."""
    publisher = context.plugins[PLUGIN]
    assert isinstance(publisher, WeightPublisher)
    return publisher


def guarded(function: Callable[[], T], failed: Callable[[str], T]) -> T:
    """Run `function`; an exception becomes `failed(its text)`, because it must not end the trainer."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - the boundary of the trainer's process: reported to the service
        return failed(f"{type(error).__name__}: {error}")


def open_publisher(context: RankTensors, n_slots: int) -> Opened:
    """Allocate the slots, in place of those of an earlier service."""

    def work() -> Opened:
        close_publisher(context)
        publisher = WeightPublisher(context, n_slots)
        context.plugins[PLUGIN] = publisher
        return Opened(context.rank, publisher.arena.layout)

    return guarded(work, lambda error: Opened(context.rank, None, error))


def stage(context: RankTensors, slot: int, version: int, owned: list[list[int]]) -> StageReport:
    """Copy the live shards into `slot` under `version`. `owned` names, per rank, the entries it digests."""
    return guarded(
        lambda: publisher_of(context).stage(context, slot, version, owned[context.rank]),
        lambda error: StageReport(context.rank, error=error),
    )


def slot_sums(context: RankTensors, version: int, timeout_s: float) -> StageReport:
    """The sums of a version whose StageReport had none."""
    return guarded(
        lambda: StageReport(context.rank, sums=publisher_of(context).sums(version, timeout_s)),
        lambda error: StageReport(context.rank, error=error),
    )


def close_publisher(context: RankTensors) -> Done:
    """Let go of slots and transports. Harmless when there are none."""

    def work() -> Done:
        publisher = context.plugins.pop(PLUGIN, None)
        if publisher is not None:
            publisher.close()
        return Done(context.rank)

    return guarded(work, lambda error: Done(context.rank, error))
