"""Options and counters of the weight sync service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from controllers.ports import PauseMode


@dataclass(frozen=True, slots=True)
class WeightSyncOptions:
    """Times are seconds, sizes bytes.

    `mode` is how engines pause; `max_updating` bounds how many pause at once (None: all). A publication waits
    `slot_wait_s` for a slot before it revokes the slowest reader's lease. Live parameters are digested again every
    `audit_every` updates (0: only at the first). `folder` is a path that trainer and engines share, for `disk` and
    for the fallback of the others; None leaves those without one.
    """

    transport: str = "rdt"
    mode: PauseMode = "in_place"
    max_updating: int | None = None
    n_slots: int = 2
    slot_wait_s: float = 10.0
    lease_ttl_s: float = 10.0
    publish_timeout_s: float = 120.0
    pull_timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    vote_timeout_s: float = 60.0
    audit_every: int = 50
    folder: Path | None = None
    host: str = "127.0.0.1"
    poll_s: float = 20.0
    chunk_bytes: int = 256 << 20
    quarantine_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        if self.n_slots < 2:
            raise ValueError(f"weight sync needs at least 2 slots, not {self.n_slots}: one is always committed")
        if self.max_updating is not None and self.max_updating < 1:
            raise ValueError(f"max_updating must be at least 1, not {self.max_updating}")


@dataclass(slots=True)
class WeightSyncStatistics:
    """Counts and seconds since the start. `pause_s` is from asking for the pause to having resumed, summed."""

    publishes: int = 0
    publish_failures: int = 0
    publish_s: float = 0.0
    copy_s: float = 0.0
    joins: int = 0
    updates: int = 0
    update_failures: int = 0
    pulls: int = 0
    pull_s: float = 0.0
    pull_failures: int = 0
    bytes_pulled: int = 0
    pause_s: float = 0.0
    last_pause_s: float = 0.0
    last_sync_s: float = 0.0
    install_s: float = 0.0
    audits: int = 0
    fallbacks: int = 0
    stale_votes: int = 0
    active_leases: int = 0
    leases_revoked: int = 0
    leases_expired: int = 0
