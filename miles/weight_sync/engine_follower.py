"""One incarnation's way through weight sync: join, then update after update, until it ends.

Invariant: from the pause on, an engine either resumes with votes of all ranks for one version, or is failed (and
restarted by the controller). It is never resumed after an install that was not proven: its weights may be torn.
A pause that is under way when the follower is cancelled may still end well, for a short time; then it is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import anyio
import structlog

from controllers.errors import (
    EngineFailed,
    IllegalTransition,
    MilesError,
    StaleIncarnation,
    WaitTimeout,
    WeightSyncError,
)
from controllers.ports import Engine
from controllers.weight_versions import WeightVersion
from miles.weight_sync.messages import PROTOCOL, Install, Installed, PullFailed, encode
from miles.weight_sync.options import WeightSyncOptions, WeightSyncStatistics
from miles.weight_sync.ports import Controller
from miles.weight_sync.session import EngineSession

LOADER = "miles.weight_sync.agent.load"
_FAILURES_BEFORE_FALLBACK = 2
_FAILURES_BEFORE_GIVING_UP = 4
_CANCELLED_PAUSE_S = 3.0
"""How long a pause may go on after a cancellation. Installs take milliseconds; a shutdown has seconds."""

_log = structlog.get_logger(__name__)


class Publications(Protocol):
    """What a follower asks of the service."""

    @property
    def newest(self) -> WeightVersion | None: ...

    @property
    def source(self) -> int | None: ...

    async def ensure_source(self) -> int: ...

    async def newer_than(self, number: int) -> WeightVersion: ...

    def start_command(self, session: EngineSession) -> bytes: ...

    async def fall_back(self, session: EngineSession) -> bool: ...


class EngineFollower:
    """Follows one session. `updating` bounds how many engines pause at once."""

    def __init__(
        self,
        session: EngineSession,
        controller: Controller,
        publications: Publications,
        options: WeightSyncOptions,
        counts: WeightSyncStatistics,
        updating: anyio.CapacityLimiter,
    ) -> None:
        self._session = session
        self._controller = controller
        self._publications = publications
        self._options = options
        self._counts = counts
        self._updating = updating
        self._updates = 0
        self._log = _log.bind(engine=session.engine, incarnation=session.incarnation)

    async def run(self) -> None:
        """Return when the incarnation has ended or was failed."""
        session = self._session
        with session.ended:
            try:
                proven = await self._join()
                while True:
                    proven = await self._update(await self._publications.newer_than(proven.number))
            except (StaleIncarnation, EngineFailed, IllegalTransition) as error:
                self._log.debug("weight_sync.engine_left", reason=error.message)
            except MilesError as error:
                self._counts.update_failures += 1
                self._log.warning("weight_sync.engine_failed", error=error.message)
                self._fail(error.message)

    async def _join(self) -> WeightVersion:
        """Bring a new incarnation to the newest version and admit it."""
        session = self._session
        start = time.perf_counter()
        engine = self._controller.engine(session.engine, session.incarnation)
        command = self._publications.start_command(session)
        await engine.call_weight_loader(LOADER, command, self._options.start_timeout_s)
        await session.all_ready(self._options.start_timeout_s)
        version = await self._stage(await self._publications.newer_than(0))
        await self._install(engine, version, lambda: None)
        await self._audit(version)
        self._controller.admit(session.engine, session.incarnation, version)
        self._counts.joins += 1
        self._log.info("weight_sync.joined", version=version.number, seconds=round(time.perf_counter() - start, 4))
        return version

    async def _update(self, target: WeightVersion) -> WeightVersion:
        """Pull while the engine generates, then change its weights in one pause."""
        session = self._session
        start = time.perf_counter()
        version = await self._stage(target)
        async with (
            self._updating,
            self._controller.updating(session.engine, session.incarnation, version) as update,
        ):
            await self._install(update.engine, version, update.prove)
        self._counts.updates += 1
        self._counts.last_sync_s = time.perf_counter() - start
        self._updates += 1
        if self._options.audit_every and self._updates % self._options.audit_every == 0:
            await self._audit(version)
        return version

    async def _stage(self, target: WeightVersion) -> WeightVersion:
        """Have all ranks stage `target` or a newer version. Goes to disk after two failed pulls.

        A pull from trainer ranks that were lost is no fault of the engine: it waits for what new ranks publish.
        Raises WeightSyncError when the disk fails too, WaitTimeout for a missing vote.
        """
        failures = 0
        while True:
            source = await self._publications.ensure_source()
            self._session.request_pull(self._publications.newest or target)
            outcome = await self._session.all_staged(self._options.vote_timeout_s + self._options.pull_timeout_s)
            if not isinstance(outcome, PullFailed):
                return outcome
            if self._publications.source != source:
                continue
            failures += 1
            if failures >= _FAILURES_BEFORE_GIVING_UP:
                raise WeightSyncError(f"{self._session.incarnation}: {failures} pulls failed: {outcome.reason}")
            if failures >= _FAILURES_BEFORE_FALLBACK and not await self._publications.fall_back(self._session):
                raise WeightSyncError(f"{self._session.incarnation} cannot pull its weights: {outcome.reason}")

    async def _install(self, engine: Engine, version: WeightVersion, prove: Callable[[], None]) -> None:
        """One pause, of bounded length also when cancelled. Leaving by an error leaves the engine paused: its caller
        fails it. Leaving by cancellation fails it here."""
        session = self._session
        limit_s = 2 * self._options.vote_timeout_s  # the loader and the votes each have their own
        start = time.perf_counter()
        votes: list[Installed] = []
        failure: MilesError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope(deadline=anyio.current_time() + limit_s, shield=True) as pause:
                    tasks.start_soon(_give_up_after_cancellation, pause)
                    try:
                        votes = await self._change_weights(engine, version, prove)
                    except MilesError as error:  # raised below: the task group would wrap it
                        failure = error
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            if not votes:
                self._fail(f"weight sync ended while it installed version {version.number}")
            raise
        if failure is not None:
            raise failure
        if not votes:
            raise WaitTimeout(
                f"{session.incarnation} did not change its weights within {limit_s} s, or was cancelled meanwhile",
                waited_for=f"{session.incarnation} to install version {version.number}",
                engine=session.engine,
                incarnation=session.incarnation,
            )
        self._counts.last_pause_s = time.perf_counter() - start
        self._counts.pause_s += self._counts.last_pause_s
        self._counts.install_s += max(vote.install_s for vote in votes)

    async def _change_weights(
        self, engine: Engine, version: WeightVersion, prove: Callable[[], None]
    ) -> list[Installed]:
        """Pause, install, prove, label, resume; the votes."""
        session, timeout_s = self._session, self._options.vote_timeout_s
        await engine.pause(self._options.mode)
        await engine.call_weight_loader(
            LOADER, encode(Install(PROTOCOL, session.incarnation, version.number)), timeout_s
        )
        votes = await session.all_installed(version, timeout_s)
        prove()
        await engine.set_weight_version(f"{session.incarnation}:{version.number}")
        await engine.resume()
        return votes

    async def _audit(self, version: WeightVersion) -> None:
        """Have every rank digest its live parameters, off the pause. Raises WeightSyncError where they differ."""
        self._session.request_audit(version)
        try:
            await self._session.all_audited(version, self._options.vote_timeout_s)
        finally:
            self._session.request_audit(None)
        self._counts.audits += 1

    def _fail(self, reason: str) -> None:
        try:
            self._controller.fail(self._session.engine, self._session.incarnation, reason)
        except StaleIncarnation:
            return  # it has been replaced already


async def _give_up_after_cancellation(pause: anyio.CancelScope) -> None:
    """Runs beside a shielded pause: bounds it once its surroundings are cancelled."""
    try:
        await anyio.sleep_forever()
    finally:
        pause.deadline = min(pause.deadline, anyio.current_time() + _CANCELLED_PAUSE_S)
