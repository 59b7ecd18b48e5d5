"""What one incarnation of an engine still has to do, and what its ranks have said of themselves.

Invariant: only votes of this incarnation count, and a step is done when *every* rank has voted it. Work is offered
until it is voted on, so a lost answer is asked for again. Written by the control server, awaited by the service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from controllers.errors import StaleIncarnation, WaitTimeout, WeightSyncError
from controllers.weight_versions import WeightVersion
from miles.weight_sync.messages import AnyVote, Audited, Failed, Installed, PullFailed, Ready, Staged

T = TypeVar("T")


@dataclass(slots=True)
class RankState:
    """The last thing one rank said of each kind."""

    ready: bool = False
    staged: Staged | None = None
    installed: Installed | None = None
    audited: Audited | None = None
    pull_failed: PullFailed | None = None


@dataclass(slots=True)
class EngineSession:
    """One incarnation. `ended` cancels the task that follows it; `granted` are versions its ranks may hold."""

    engine: str
    incarnation: str
    ranks: int
    ended: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    pulling: set[int] = field(default_factory=set)
    auditing: WeightVersion | None = None
    fallback: WeightVersion | None = None
    granted: dict[int, WeightVersion] = field(default_factory=dict)
    _states: list[RankState] = field(default_factory=list)
    _failure: str | None = None
    _over: str | None = None
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self._states = [RankState() for _ in range(self.ranks)]

    # -- written by votes

    def vote(self, vote: AnyVote) -> None:
        """Note a vote. A second one of the same kind replaces the first."""
        if not 0 <= vote.rank < self.ranks:
            self._failure = f"rank {vote.rank} voted, but the engine has {self.ranks} ranks"
            self.wake()
            return
        state = self._states[vote.rank]
        match vote:
            case Ready():
                state.ready = True
            case Staged():
                state.staged = vote
                self.pulling.discard(vote.rank)
            case Installed():
                state.installed = vote
            case Audited():
                state.audited = vote
            case PullFailed():
                state.pull_failed = vote
                self.pulling.discard(vote.rank)
            case Failed():
                self._failure = f"rank {vote.rank}: {vote.reason}"
        self.wake()

    def end(self, reason: str) -> None:
        """The incarnation is over: whoever waits for its votes gets StaleIncarnation."""
        self._over = self._over or reason
        self.ended.cancel()
        self.wake()

    # -- work

    def request_pull(self, version: WeightVersion) -> None:
        """Have every rank that has not staged `version` pull the newest one."""
        for rank, state in enumerate(self._states):
            state.pull_failed = None
            if state.staged is None or state.staged.version < version.number:
                self.pulling.add(rank)
        self.wake()

    def request_audit(self, version: WeightVersion | None) -> None:
        """Have every rank digest its live parameters; None takes the request back."""
        self.auditing = version
        for state in self._states:
            state.audited = None
        self.wake()

    def wants_audit(self, rank: int) -> bool:
        """Whether this rank still owes an audit."""
        return self.auditing is not None and self._states[rank].audited is None

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Return at the next change. Look first, then call this with no await between."""
        await self._changed.wait()

    # -- awaited by the service; WaitTimeout names engine and ranks; WeightSyncError for a Failed vote

    async def all_ready(self, timeout_s: float) -> None:
        """Every rank's agent is up."""
        await self._every(lambda state: state.ready or None, "to start their pull agent", timeout_s)

    async def all_staged(self, timeout_s: float) -> WeightVersion | PullFailed:
        """The version of which every rank holds verified bytes; or the first failed pull."""

        def outcome() -> WeightVersion | PullFailed | None:
            for state in self._states:
                if state.pull_failed is not None:
                    return state.pull_failed
            votes = [state.staged for state in self._states if state.staged is not None]
            if self.pulling or len(votes) < self.ranks:
                return None
            newest = max(vote.version for vote in votes)
            behind = {vote.rank for vote in votes if vote.version < newest}
            if behind:  # a rank took up a newer version: the others have to follow it
                self.pulling |= behind
                self.wake()
                return None
            version = self.granted[newest]
            for vote in votes:
                self._agrees(vote, version)
            self.granted = {newest: version}
            return version

        return await self._until(outcome, lambda state: state.staged is None, "to stage a version", timeout_s)

    async def all_installed(self, version: WeightVersion, timeout_s: float) -> list[Installed]:
        """Every rank wrote its live parameters from staging with the digest of `version`."""

        def installed(state: RankState) -> Installed | None:
            vote = state.installed
            if vote is None or vote.version != version.number:
                return None
            return self._agrees(vote, version)

        return await self._every(installed, f"to install version {version.number}", timeout_s)

    async def all_audited(self, version: WeightVersion, timeout_s: float) -> list[Audited]:
        """Every rank's live parameters have the digest of `version`."""

        def audited(state: RankState) -> Audited | None:
            vote = state.audited
            if vote is None or vote.version != version.number:
                return None
            return self._agrees(vote, version)

        return await self._every(audited, f"to audit version {version.number}", timeout_s)

    def _agrees(self, vote: T, version: WeightVersion) -> T:
        digest = getattr(vote, "digest", None)
        if digest != version.digest:
            raise WeightSyncError(
                f"{self.incarnation} rank {getattr(vote, 'rank', '?')} has weights with digest {digest}, "
                f"version {version.number} has {version.digest}",
                engine=self.engine,
                incarnation=self.incarnation,
            )
        return vote

    async def _every(self, done: Callable[[RankState], T | None], doing: str, timeout_s: float) -> list[T]:
        def outcome() -> list[T] | None:
            found = [done(state) for state in self._states]
            kept = [each for each in found if each is not None]
            return kept if len(kept) == self.ranks else None

        return await self._until(outcome, lambda state: done(state) is None, doing, timeout_s)

    async def _until(
        self, outcome: Callable[[], T | None], missing: Callable[[RankState], bool], doing: str, timeout_s: float
    ) -> T:
        with anyio.move_on_after(timeout_s):
            while True:
                if self._over is not None:
                    raise StaleIncarnation(f"{self.incarnation} is over: {self._over}", incarnation=self.incarnation)
                if self._failure is not None:
                    raise WeightSyncError(
                        f"{self.incarnation}: {self._failure}", engine=self.engine, incarnation=self.incarnation
                    )
                found = outcome()
                if found is not None:
                    return found
                await self.changed()
        ranks = [rank for rank, state in enumerate(self._states) if missing(state)]
        raise WaitTimeout(
            f"{self.incarnation}: waited {timeout_s} s for ranks {ranks} {doing}",
            waited_for=f"{self.incarnation} ranks {ranks} {doing}",
            engine=self.engine,
            incarnation=self.incarnation,
            ranks=tuple(ranks),
        )
