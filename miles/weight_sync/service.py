"""Publishes a trainer's weights and gets them, proven, into every engine. Runs in the driver; moves no bytes itself.

    publish(): reserve a number -> one slot for all ranks -> every rank stages -> digest -> commit
    ranks lost: nothing can be read -> new ranks are opened by the next publication, or for the first engine that pulls
    each incarnation: start agent -> pull -> install -> audit -> admit, then per version: pull while it generates ->
                      pause -> install -> votes of all ranks -> prove -> label -> resume

Invariants: the committed slot is never written; nothing is committed that one rank has not staged; an engine leaves a
pause proven or failed. Hears of engines through controller events, and of weights through the ranks' runner.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from controllers.errors import MilesError, PublishFailed, StaleIncarnation
from controllers.event_bus import Subscription
from controllers.events import EngineLaunched, EngineStateChanged
from controllers.weight_versions import WeightVersion
from miles.weight_sync.control_server import ControlServer
from miles.weight_sync.engine_follower import EngineFollower
from miles.weight_sync.leases import LeaseTable
from miles.weight_sync.messages import (
    PROTOCOL,
    AnyVote,
    Ask,
    Audit,
    Job,
    Pull,
    PullFailed,
    Renew,
    Staged,
    Start,
    VersionRecord,
)
from miles.weight_sync.options import WeightSyncOptions, WeightSyncStatistics
from miles.weight_sync.ports import Controller, RankRunner
from miles.weight_sync.rank_slots import RankSlots
from miles.weight_sync.session import EngineSession
from miles.weight_sync.transports.base import Transport, TransportOptions, find_transport

_log = structlog.get_logger(__name__)
_OVER = frozenset({"Draining", "Failed", "Stopped", "Launching"})
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Committed:
    """The newest version, and the slot it lies in."""

    version: WeightVersion
    slot: int
    incarnation: int | None
    """Of the ranks whose slot it is."""


class TrainerWentOn(PublishFailed):
    """It cannot be said of which step the staged weights are."""


class WeightSyncService:
    """Weight sync while it is entered. The trainer's ranks must be up; engines may come and go."""

    def __init__(self, controller: Controller, ranks: RankRunner, options: WeightSyncOptions) -> None:
        self._controller = controller
        self._ranks = ranks
        self._options = options
        self._token = secrets.token_urlsafe(24)
        self._leases = LeaseTable(options.n_slots, options.lease_ttl_s, time.monotonic)
        self._transport: Transport = find_transport(options.transport)(TransportOptions(options.folder))
        self._fallback: Transport | None = None
        self._on_disk = -1
        self._slots = RankSlots(ranks, options.n_slots, self._transport)
        self._committed: Committed | None = None
        self._new_version = anyio.Event()
        self._publishing = anyio.Lock()
        self._falling_back = anyio.Lock()
        self._sessions: dict[str, EngineSession] = {}
        self._counts = WeightSyncStatistics()
        self._updating = anyio.CapacityLimiter(options.max_updating or 1_000_000)
        self._server = ControlServer(self, self._token, options.host)
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> WeightSyncService:
        """Open the slots of every rank, the transport and the control server, and begin to follow engines."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            stack.push_async_callback(self._slots.close)
            stack.push_async_callback(self._close_transports)
            await self._slots.open()
            stack.callback(self._end_sessions)  # after the tasks: a pause that is under way needs its votes
            events = await stack.enter_async_context(
                self._controller.bus.subscribe("weight-sync", buffer=4096, kinds=(EngineLaunched, EngineStateChanged))
            )
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            self._tasks.start_soon(self._listen, events)
            for engine in self._controller.snapshot():
                if engine.state == "Syncing":
                    self._meet(engine.engine, engine.incarnation)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        if isinstance(error, Exception):
            # The body's own error leaves as it is: a task group would wrap what it is told of into a group.
            await self._stack.__aexit__(None, None, None)
            return None
        return await self._stack.__aexit__(kind, error, trace)

    # -- publishing

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version committed by this service, which is the one that can be pulled."""
        return None if self._committed is None else self._committed.version

    async def newer_than(self, number: int) -> WeightVersion:
        """Wait for a version above `number`."""
        while self._committed is None or self._committed.version.number <= number:
            await self._new_version.wait()
        return self._committed.version

    @property
    def source(self) -> int | None:
        """The incarnation of the ranks from which the newest version can be pulled; None once they are lost."""
        held = None if self._committed is None else self._committed.incarnation
        return held if held == self._ranks.incarnation else None

    async def ensure_source(self) -> int:
        """`source`, once there is one. Where the ranks were lost, new ones publish first.

        Raises PublishFailed, or what the ranks raise when they do not come back.
        """
        while (source := self.source) is None:
            async with self._publishing:
                committed = self._committed
                if committed is not None and self.source is None:
                    _log.warning("weight_sync.republish", lost=committed.version.number)
                    with contextlib.suppress(TrainerWentOn):  # what it does next will be published
                        await self._publish(None, committed.version.lineage)
            if self._committed is None:
                await self._new_version.wait()
        return source

    async def publish(self, step: int, lineage: int = 1) -> WeightVersion:
        """Stage the ranks' weights as they are now and commit them; engines follow on their own.

        Returns at commit. Raises PublishFailed, and commits nothing, when a rank did not stage them. Where ranks were
        lost and replaced meanwhile the new ones stage them, under another number.
        """
        async with self._publishing:
            return await self._publish(step, lineage)

    async def _publish(self, step: int | None, lineage: int) -> WeightVersion:
        """One publication, for its turn. `step` None stands for the one that the trainer stands at."""
        while True:
            if self._slots.are_gone:
                await self._slots.open()
                self._leases.release_slots()
            try:
                return await self._publish_once(step, lineage)
            except PublishFailed:
                if not self._slots.are_gone:
                    raise

    async def _publish_once(self, step: int | None, lineage: int) -> WeightVersion:
        start = time.perf_counter()
        number = self._controller.reserve_version()
        taken = self._committed.slot if self._committed is not None and self.source is not None else None
        slot = await self._leases.free_slot(taken, self._options.slot_wait_s)
        try:
            with anyio.fail_after(self._options.publish_timeout_s):
                staged = await self._slots.stage(number, slot, self._options.publish_timeout_s)
                known = staged.step if step is None else step
                if known is None:
                    raise TrainerWentOn(f"the trainer took a step while version {number} was staged", number=number)
                version = WeightVersion(number, known, lineage, staged.digest)
                await self._transport.publish(self._ranks, _record(version), slot)
        except (MilesError, TimeoutError) as error:
            self._counts.publish_failures += 1
            if isinstance(error, PublishFailed):
                raise
            detail = str(error) or f"not within {self._options.publish_timeout_s} s"
            raise PublishFailed(f"version {number} was not staged: {detail}", number=number) from error
        if self._slots.are_gone:
            raise PublishFailed(f"the ranks that staged version {number} were lost", number=number)
        self._controller.commit_version(version)
        self._committed = Committed(version, slot, self._slots.incarnation)
        self._new_version.set()
        self._new_version = anyio.Event()
        self._counts.publishes += 1
        self._counts.copy_s += staged.copy_s
        self._counts.publish_s += time.perf_counter() - start
        await self._retire()
        return version

    def statistics(self) -> WeightSyncStatistics:
        """Counts since the start."""
        return replace(
            self._counts,
            active_leases=self._leases.active(),
            leases_revoked=self._leases.revoked,
            leases_expired=self._leases.expired,
        )

    async def _retire(self) -> None:
        in_use = self._leases.versions()
        if self._committed is not None:
            in_use.add(self._committed.version.number)
        await self._transport.retire(in_use)
        if self._fallback is not None:
            await self._fallback.retire(in_use)

    # -- what agents ask (the control server calls these)

    async def next_job(self, ask: Ask) -> Job | None:
        with anyio.move_on_after(self._options.poll_s):
            while True:
                session = self._session(ask.incarnation)
                if ask.rank in session.pulling:
                    if (pull := self.acquire(ask)) is not None:
                        return pull
                    reason = "the trainer's ranks were lost"
                    session.vote(
                        PullFailed(incarnation=ask.incarnation, rank=ask.rank, version=0, lease="", reason=reason)
                    )
                if session.auditing is not None and session.wants_audit(ask.rank):
                    return Audit(session.auditing.number)
                await session.changed()
        return None

    def acquire(self, ask: Ask) -> Pull | None:
        session = self._session(ask.incarnation)
        if self._committed is None or self.source is None:
            return None
        version, slot = self._committed.version, self._committed.slot
        transport, name, held = self._transport, self._options.transport, slot
        if session.fallback == version and self._fallback is not None:
            transport, name = self._fallback, "disk"
        lease = self._leases.grant((ask.incarnation, ask.rank), version.number, held if name == "rdt" else None)
        session.granted[version.number] = version
        source = msgspec.Raw(transport.source(_record(version), slot))
        return Pull(_record(version), name, source, lease.lease, self._leases.ttl_s)

    def renew(self, renew: Renew) -> bool:
        self._session(renew.incarnation)
        return self._leases.renew(renew.lease)

    def vote(self, vote: AnyVote) -> None:
        if vote.incarnation not in self._sessions:
            self._counts.stale_votes += 1
            _log.info("weight_sync.stale_vote_dropped", incarnation=vote.incarnation, vote=type(vote).__name__)
        session = self._session(vote.incarnation)
        if isinstance(vote, Staged):
            self._counts.pulls += 1
            self._counts.pull_s += vote.pull_s
            self._counts.bytes_pulled += vote.nbytes
            self._leases.release(vote.lease)
        elif isinstance(vote, PullFailed):
            self._counts.pull_failures += 1
            self._leases.release(vote.lease)
            _log.warning("weight_sync.pull_failed", incarnation=vote.incarnation, rank=vote.rank, reason=vote.reason)
        session.vote(vote)

    def _session(self, incarnation: str) -> EngineSession:
        session = self._sessions.get(incarnation)
        if session is None:
            raise StaleIncarnation(f"{incarnation} is not followed", incarnation=incarnation)
        return session

    # -- engines come and go

    async def _listen(self, events: Subscription) -> None:
        async for event in events:
            if isinstance(event, EngineLaunched):
                self._meet(event.engine, event.incarnation)
            elif isinstance(event, EngineStateChanged) and event.state in _OVER:
                session = self._sessions.get(event.incarnation)
                if session is not None:
                    self._end(session, f"the engine is {event.state}")

    def _meet(self, engine: str, incarnation: str) -> None:
        """Begin to follow an incarnation, once."""
        assert self._tasks is not None
        if incarnation in self._sessions:
            return
        try:
            ranks = self._controller.engine(engine, incarnation).ranks
        except StaleIncarnation:
            return
        session = EngineSession(engine, incarnation, ranks)
        self._sessions[incarnation] = session
        follower = EngineFollower(session, self._controller, self, self._options, self._counts, self._updating)
        self._tasks.start_soon(self._follow, follower, session)

    async def _follow(self, follower: EngineFollower, session: EngineSession) -> None:
        try:
            await follower.run()
        finally:
            self._end(session, "it is no longer followed")

    def _end(self, session: EngineSession, reason: str) -> None:
        session.end(reason)
        self._sessions.pop(session.incarnation, None)
        for rank in range(session.ranks):
            self._leases.release_holder((session.incarnation, rank))

    def _end_sessions(self) -> None:
        """Long polls answer 410, so agents end and the server can."""
        for session in list(self._sessions.values()):
            self._end(session, "weight sync ends")

    # -- for the followers

    def start_command(self, session: EngineSession) -> bytes:
        """The manifest that starts an incarnation's agents."""
        return msgspec.json.encode(
            Start(
                protocol=PROTOCOL,
                engine=session.engine,
                incarnation=session.incarnation,
                control_url=self._server.url,
                token=self._token,
                layouts=self._slots.layouts,
                transport=self._options.transport,
                source=msgspec.Raw(self._transport.source(None, 0)),
                pull_timeout_s=self._options.pull_timeout_s,
                chunk_bytes=self._options.chunk_bytes,
                quarantine_bytes=self._options.quarantine_bytes,
            )
        )

    async def fall_back(self, session: EngineSession) -> bool:
        """Have the ranks write the committed version to disk, once, and send this engine there. False without a folder.

        Raises PublishFailed when the ranks cannot; not when they are lost, for new ones will publish another version.
        """
        if self._options.folder is None or self._options.transport == "disk":
            return False
        async with self._falling_back:
            committed = self._committed
            if committed is None or self.source is None:
                return True
            if self._fallback is None:
                fallback = find_transport("disk")(TransportOptions(self._options.folder))
                await fallback.open(self._ranks, self._slots.layouts)
                self._fallback = fallback
            if self._on_disk != committed.version.number:
                lease = self._leases.grant(("fallback", 0), committed.version.number, committed.slot)
                try:
                    await self._fallback.publish(self._ranks, _record(committed.version), committed.slot)
                except MilesError:
                    if self.source is not None:
                        raise
                    return True
                finally:
                    self._leases.release(lease.lease)
                self._on_disk = committed.version.number
        session.fallback = committed.version
        self._counts.fallbacks += 1
        _log.warning("weight_sync.fallback", incarnation=session.incarnation, version=committed.version.number)
        return True

    async def _close_transports(self) -> None:
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            await self._transport.close()
            if self._fallback is not None:
                await self._fallback.close()


def _record(version: WeightVersion) -> VersionRecord:
    return VersionRecord(version.number, version.step, version.lineage, version.digest)
