"""Generates one trajectory, over as many requests and engines as it takes.

    lease -> request -> chunks ... finish                               the usual way
                |-- broken, aborted, revoked, refused -> failure policy -> lease elsewhere -> request the rest

Invariants: an orphan is aborted on its engine before the trajectory goes on, so at most one generation of it lives;
received tokens are kept under `partial: continue`; every wait has a deadline. Called by the executor's group runner.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

import anyio
import structlog

from controllers.errors import EngineFailed, EngineRejected, InfrastructureError, WaitTimeout
from executors.errors import TrajectoryFailed
from executors.failure_policy import FailurePolicy, GiveUp, Incident, Interruption, Retry
from executors.generation_stream import GenerationStream
from executors.ports import Lease, LeaseSource
from executors.revocation_watch import RevocationWatch
from executors.sampling_client import GenerateRequest, LabelSpan, SamplingClient, SamplingParams, TokenChunk
from executors.statistics import ExecutorCounters
from executors.trajectory import StopReason

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 1000
"""Request ids are of fixed length, with three digits for the attempt."""

_EXCLUDE_PATIENCE_S = 2.0
"""How long to hold out for another engine before the one that failed is welcome again."""

_WHOLE = frozenset({StopReason.STOP.value, StopReason.LENGTH.value})

_LEAVES_ORPHAN = frozenset({Interruption.UNREACHABLE, Interruption.TIMED_OUT, Interruption.MALFORMED})
"""After these the engine may still be generating. A revoked request has been aborted already."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Deadlines, in seconds."""

    request_timeout_s: float
    """How long one request may wait for its next tokens (and up to a tenth more)."""
    lease_timeout_s: float
    """How long to wait for an engine while no token is generated anywhere."""
    trajectory_timeout_s: float
    """How long one trajectory may take from its first lease on, interruptions included."""
    abort_timeout_s: float
    """How long an abort call may take, and how long a revoked request may go on to hand over its last tokens."""


class _Interrupted(Exception):
    """A request ended without its answer."""

    def __init__(self, kind: Interruption, detail: str, engine: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.engine = engine
        self.status = status


class TrajectoryGenerator:
    """Runs trajectories. It holds no state of one: that is in the GenerationStream the caller passes."""

    def __init__(
        self,
        leases: LeaseSource,
        client: SamplingClient,
        policy: FailurePolicy,
        limits: GenerationLimits,
        counters: ExecutorCounters,
        revocations: RevocationWatch,
    ) -> None:
        self._leases = leases
        self._client = client
        self._policy = policy
        self._limits = limits
        self._counters = counters
        self._revocations = revocations

    async def generate(self, name: str, stream: GenerationStream, sampling: SamplingParams) -> StopReason:
        """Fill `stream` until it is finished. `name` is the fixed-length stem of its request ids.

        Raises TrajectoryFailed (with `reason` and `outcome`) when the failure policy gives up or time is up.
        """
        exclude: frozenset[str] = frozenset()
        in_a_row = 0
        for attempt in range(MAX_ATTEMPTS):
            request_id = f"{name}-a{attempt:03d}"
            tokens_before = len(stream.token_ids)
            try:
                return await self._attempt(request_id, stream, sampling, exclude)
            except _Interrupted as error:
                interrupted = error
            reason = stream.stop_reason()
            if reason is not None:
                return reason
            if anyio.current_time() >= stream.deadline:
                raise _failed(name, "trajectory_timeout", interrupted.detail) from interrupted
            in_a_row += 1
            gained = len(stream.token_ids) - tokens_before
            retry = self._decide(request_id, stream, interrupted, gained, in_a_row)
            if not retry.keep_tokens:
                stream.restart()
            elif gained:
                in_a_row = 0
            exclude = frozenset({interrupted.engine}) if retry.elsewhere else frozenset()
            if retry.delay_s:
                await anyio.sleep(retry.delay_s)
            self._counters.retries += 1
        raise _failed(name, "too_many_attempts", f"interrupted {MAX_ATTEMPTS} times")

    def _decide(
        self, request_id: str, stream: GenerationStream, interrupted: _Interrupted, gained: int, in_a_row: int
    ) -> Retry:
        incident = Incident(
            kind=interrupted.kind,
            detail=interrupted.detail,
            received=len(stream.token_ids),
            gained=gained,
            in_a_row=in_a_row,
            status=interrupted.status,
        )
        decision = self._policy.decide(incident)
        log.debug(
            "request_interrupted",
            request=request_id,
            engine=interrupted.engine,
            kind=str(incident.kind),
            detail=incident.detail,
            received=incident.received,
            decision=decision,
        )
        if isinstance(decision, GiveUp):
            raise _failed(request_id, decision.reason, interrupted.detail, decision.outcome) from interrupted
        return decision

    async def _attempt(
        self,
        request_id: str,
        stream: GenerationStream,
        sampling: SamplingParams,
        exclude: frozenset[str],
    ) -> StopReason:
        async with AsyncExitStack() as held:
            lease = await self._acquire(held, request_id, exclude)
            if stream.deadline == math.inf:
                # Time in the queue of a busy fleet is nobody's fault, so the clock starts with the first lease.
                stream.deadline = anyio.current_time() + self._limits.trajectory_timeout_s
            if lease.revoked.is_set():
                raise _Interrupted(Interruption.REVOKED, "revoked before it was used", lease.engine)
            return await self._request(request_id, lease, stream, sampling)

    async def _acquire(self, held: AsyncExitStack, request_id: str, exclude: frozenset[str]) -> Lease:
        while True:
            tokens_before = self._counters.tokens_generated
            timeout_s = _EXCLUDE_PATIENCE_S if exclude else self._limits.lease_timeout_s
            try:
                return await held.enter_async_context(self._leases.lease(exclude=exclude, timeout_s=timeout_s))
            except WaitTimeout as error:
                if exclude:
                    exclude = frozenset()
                elif self._counters.tokens_generated == tokens_before:
                    raise _failed(request_id, "no_engine", str(error)) from error

    async def _request(
        self, request_id: str, lease: Lease, stream: GenerationStream, sampling: SamplingParams
    ) -> StopReason:
        """Send one request and read its answer. Raises _Interrupted when there is no whole one."""
        if stream.remaining != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=stream.remaining)
        request = GenerateRequest(
            request_id, stream.input_ids(), sampling, lease.cache_salt, stream.routing_from()
        )
        reading = _Reading(lease, stream, self._counters, self._limits.request_timeout_s)

        async def on_revoked() -> None:
            reading.hand_over(self._limits.abort_timeout_s)
            await self._abort(lease, request_id)

        stream.begin_attempt(lease.version.number)
        self._counters.requests += 1
        self._counters.running += 1
        ticket = self._revocations.subscribe(lease.revoked, on_revoked)
        try:
            answer = await reading.read(self._client.generate(lease.url, request))
        except anyio.get_cancelled_exc_class():
            if reading.finish is None:
                with anyio.CancelScope(shield=True):  # an orphan would hold its slot on the engine to the end
                    await self._abort(lease, request_id)
            raise
        finally:
            self._counters.running -= 1
            self._revocations.unsubscribe(lease.revoked, ticket)
        if isinstance(answer, _Interrupted) and answer.kind in _LEAVES_ORPHAN:
            await self._abort(lease, request_id)
        if not stream.end_attempt(lease.incarnation, reading.labels):
            self._counters.stale_answers_dropped += 1
            detail = f"labels {[label.label for label in reading.labels]} on a lease of {lease.incarnation}"
            log.warning("foreign_answer_dropped", request=request_id, engine=lease.engine, detail=detail)
            raise _Interrupted(Interruption.FOREIGN_ANSWER, detail, lease.engine)
        if isinstance(answer, _Interrupted):
            raise answer
        return answer

    async def _abort(self, lease: Lease, request_id: str) -> None:
        """Best effort: an engine that is gone has nothing left to abort."""
        self._counters.aborted += 1
        with anyio.move_on_after(self._limits.abort_timeout_s), suppress(InfrastructureError):
            await self._client.abort(lease.url, request_id)


class _Reading:
    """One answer being read. `finish` and `labels` are what its last chunk said."""

    __slots__ = ("_counters", "_idle_s", "_lease", "_prolong_at", "_revoked", "_scope", "_stream", "finish", "labels")

    def __init__(self, lease: Lease, stream: GenerationStream, counters: ExecutorCounters, idle_s: float) -> None:
        self._lease = lease
        self._stream = stream
        self._counters = counters
        self._idle_s = idle_s
        self._scope = anyio.CancelScope()
        self._prolong(anyio.current_time())
        self._revoked = False
        self.finish: str | None = None
        self.labels: tuple[LabelSpan, ...] = ()

    def hand_over(self, patience_s: float) -> None:
        """The lease is revoked: wait only for the tokens and labels that an aborted answer still brings."""
        self._revoked = True
        deadline = anyio.current_time() + patience_s
        self._scope.deadline = deadline if (end := self._lease.revoked.deadline) is None else min(deadline, end)

    async def read(self, chunks: AsyncIterator[TokenChunk]) -> StopReason | _Interrupted:
        """Read to the end. Returns why a whole answer ended, or what interrupted it."""
        try:
            with self._scope:
                await self._read_chunks(chunks)
        except EngineRejected as error:
            return self._interrupted(Interruption.REJECTED, str(error), error.ids.get("status"))
        except (InfrastructureError, EngineFailed) as error:
            return self._interrupted(Interruption.UNREACHABLE, str(error))
        except ValueError as error:
            return self._interrupted(Interruption.MALFORMED, str(error))
        finally:
            aclose = getattr(chunks, "aclose", None)
            if aclose is not None:
                await aclose()
        if self._scope.cancelled_caught:
            return self._interrupted(Interruption.TIMED_OUT, f"no tokens for {self._idle_s} s, or its time is up")
        if self.finish == "abort":
            return self._interrupted(Interruption.ABORTED, "aborted by the engine")
        if self.finish is None:
            return self._interrupted(Interruption.UNREACHABLE, "the answer ended without a finish")
        if self.finish not in _WHOLE or not self._stream.token_ids:
            detail = f"finish {self.finish!r} with {len(self._stream.token_ids)} tokens"
            return self._interrupted(Interruption.MALFORMED, detail)
        return StopReason(self.finish)

    async def _read_chunks(self, chunks: AsyncIterator[TokenChunk]) -> None:
        # Read on after the last chunk: only an answer read to its end gives its connection back for reuse.
        async for chunk in chunks:
            self._stream.append(chunk)
            count = len(chunk.token_ids)
            self._counters.tokens_generated += count
            self._lease.note_tokens(count)
            if chunk.finish is not None:
                self.finish, self.labels = chunk.finish, chunk.spans
            now = anyio.current_time()
            if now >= self._prolong_at and not self._revoked:
                self._prolong(now)

    def _prolong(self, now: float) -> None:
        """Wait for the next tokens until `request_timeout_s` from now, and a tenth of it more.

        So that a timer need not be set again for each chunk.
        """
        slack = self._idle_s / 10
        self._prolong_at = now + slack
        self._scope.deadline = min(now + self._idle_s + slack, self._stream.deadline)

    def _interrupted(self, kind: Interruption, detail: str, status: int | None = None) -> _Interrupted:
        if self._revoked and kind is not Interruption.REJECTED:
            kind, detail = Interruption.REVOKED, f"{self._lease.revoked.reason}; {detail}"
        return _Interrupted(kind, detail, self._lease.engine, status)


def _failed(request_id: str, reason: str, detail: str, outcome: str = "failed") -> TrajectoryFailed:
    return TrajectoryFailed(f"{request_id}: {reason}: {detail}", request_id=request_id, reason=reason, outcome=outcome)
