"""The slots of all trainer ranks, in the processes that the ranks have now. The service publishes through them.

Invariant: what was staged in an incarnation of the ranks is gone with it. Whoever finds that the ranks are no longer
those opened last opens the new ones, and stages there, before anything can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import structlog

from controllers.errors import MilesError, PublishFailed, WeightSyncError
from miles.weight_sync import digest
from miles.weight_sync.messages import Layout
from miles.weight_sync.plan import PlanError, owners, tensors_of
from miles.weight_sync.ports import RankRunner
from miles.weight_sync.publisher import close_publisher, open_publisher, slot_sums, stage
from miles.weight_sync.transports.base import Transport

_log = structlog.get_logger(__name__)
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """What the ranks staged. `step` is the trainer's optimizer step then; None where it went on meanwhile."""

    digest: str
    step: int | None
    copy_s: float


class RankSlots:
    """Slots and the transport's ends beside them. `incarnation` is that of the ranks that were opened last."""

    def __init__(self, ranks: RankRunner, n_slots: int, transport: Transport) -> None:
        self._ranks = ranks
        self._n_slots = n_slots
        self._transport = transport
        self._owned: list[list[int]] = []
        self.layouts: tuple[Layout, ...] = ()
        self.incarnation: int | None = None

    @property
    def are_gone(self) -> bool:
        """Whether the ranks have been lost since their slots were opened."""
        return self._ranks.incarnation != self.incarnation

    async def open(self) -> None:
        """Open the slots of the ranks there are now. Raises WeightSyncError, or what the ranks raise."""
        while True:
            incarnation = self._ranks.incarnation
            try:
                layouts = await self._open_ranks()
                owned = _owners(layouts)
                if self.layouts and layouts != self.layouts:  # engines have planned their reads by those
                    raise WeightSyncError("the trainer's new ranks hold other parts of the model than the lost ones")
                self.layouts, self._owned = layouts, owned
                await self._transport.open(self._ranks, layouts)
            except MilesError:
                if self._ranks.incarnation == incarnation:
                    raise
            if self._ranks.incarnation == incarnation:
                self.incarnation = incarnation
                return
            _log.warning("weight_sync.ranks_lost_while_opened", incarnation=incarnation)

    async def stage(self, number: int, slot: int, timeout_s: float) -> StagedWeights:
        """Have every rank stage its live weights. Raises PublishFailed naming the first rank that did not."""
        step = self._ranks.steps_done
        reports = await self._ranks.on_each_rank(stage, slot, number, self._owned)
        staged_step = step if self._ranks.steps_done == step else None
        copy_s = max(report.copy_s for report in reports)
        if any(report.error is None and report.sums is None for report in reports):
            reports = await self._ranks.on_each_rank(slot_sums, number, timeout_s)
        for report in reports:
            if report.error is not None:
                raise PublishFailed(
                    f"trainer rank {report.rank} did not stage version {number}: {report.error}",
                    number=number,
                    rank=report.rank,
                )
        whole = digest.combine(digest.add(report.sums or {} for report in reports), tensors_of(self.layouts))
        return StagedWeights(whole, staged_step, copy_s)

    async def close(self) -> None:
        """Let go of slots and of the transport's ends in the ranks. Bounded in time."""
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            try:
                await self._ranks.on_each_rank(close_publisher)
            except MilesError as error:  # a dead rank holds nothing any more
                _log.info("weight_sync.rank_not_closed", error=str(error))

    async def _open_ranks(self) -> tuple[Layout, ...]:
        layouts: list[Layout] = []
        for opened in await self._ranks.on_each_rank(open_publisher, self._n_slots):
            if opened.layout is None:
                raise WeightSyncError(f"trainer rank {opened.rank} cannot open its slots: {opened.error}")
            layouts.append(opened.layout)
        return tuple(layouts)


def _owners(layouts: tuple[Layout, ...]) -> list[list[int]]:
    try:
        return owners(layouts)
    except PlanError as error:
        raise WeightSyncError(str(error)) from error
