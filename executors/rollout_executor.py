"""The data plane: prompts in, finished groups and batches out, every group accounted for.

    prompts -> dispatcher -> group tasks (lease, generate, score) -> buffer -> stream() / batches() -> mark_trained
                 ^ waits for the admission gate: woken by on_published and by every group that ends untrained (where
                   staleness is not bounded, by a reader that takes a group)
                 ^ waits for permits: woken by every trajectory that gives its engine slot back
    a reader waits for a group: woken by every group that ends, by the end of the prompts, by a failure

The tasks are owned by `async with executor`. An error in one of them is kept, and raised to whoever reads.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from controllers.errors import WaitTimeout
from executors.errors import ExecutorClosed, NoUsableGroups, RolloutFailed, StreamBusy
from executors.evaluation import sample_all
from executors.failure_policy import FailurePolicy, PartialPolicy, RetryElsewhere
from executors.generation import GenerationLimits, TrajectoryGenerator
from executors.group_account import GroupAccount
from executors.group_runner import GroupEnd, GroupInFlight, GroupRunner
from executors.journal import Journal
from executors.permits import Permits
from executors.ports import LeaseSource, PromptSource, RewardScorer
from executors.revocation_watch import RevocationWatch
from executors.sampling_client import SamplingClient, SamplingParams
from executors.scoring import AbstainingScorer
from executors.staleness import AdmissionGate
from executors.statistics import ExecutorCounters, ExecutorStatistics
from executors.streams import BatchStream, GroupStream
from executors.trajectory import Batch, Group, Prompt, Trajectory
from executors.trajectory_buffer import TrajectoryBuffer

log = structlog.get_logger(__name__)

Item = TypeVar("Item")

_DEFAULT_EVALUATION_CONCURRENCY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """How rollouts are made. Raises ValueError for values that cannot work."""

    group_size: int
    groups_per_step: int
    sampling: SamplingParams
    max_context: int
    """Prompt and response together, in tokens."""
    max_prompt_tokens: int | None = None
    """Longer prompts are dropped and counted; None leaves it to `max_context`."""
    max_staleness: int | None
    """Optimizer steps that may lie between the weights that sampled a token and the step that trains it.

    None where nobody trains (evaluation, making data): no group is too old, and the reader alone sets the pace, with
    at most `2 * groups_per_step` groups generated ahead of it.
    """
    partial: PartialPolicy
    filter_zero_variance: bool = False
    concurrency: int | None = None
    """Trajectories in flight; None leaves it to admission and to the engines' own slots."""
    max_retries: int
    """Interruptions of one trajectory in a row, without a token gained, before it fails."""
    max_barren_groups: int = 2000
    """Groups in a row that may be filtered, dropped or failed before the executor gives up."""
    request_timeout_s: float
    lease_timeout_s: float = 120.0
    trajectory_timeout_s: float = 600.0
    abort_timeout_s: float = 1.0
    publish_timeout_s: float = 600.0
    """How long a reader waits with nothing in flight for weights in service new enough to dispatch more."""

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_step", "max_context", "max_barren_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.group_size > 1000:
            raise ValueError(f"group_size must be at most 1000 (request ids have fixed length), got {self.group_size}")
        if (self.max_staleness or 0) < 0 or self.max_retries < 0:
            raise ValueError("max_staleness and max_retries must not be negative")
        if self.concurrency is not None and self.concurrency < self.group_size:
            raise ValueError(f"concurrency {self.concurrency} does not let one group of {self.group_size} out")


class RolloutExecutor:
    """Generates training groups in the background while `async with` lasts, and evaluation samples on demand."""

    def __init__(
        self,
        leases: LeaseSource,
        client: SamplingClient,
        scorer: RewardScorer,
        journal: Journal,
        options: RolloutOptions,
        version_steps: Callable[[int], int],
        failure_policy: FailurePolicy | None = None,
    ) -> None:
        self.account = GroupAccount()
        self._leases = leases
        self._client = client
        self._journal = journal
        self._options = options
        self._version_steps = version_steps
        self._policy = failure_policy or RetryElsewhere(max_retries=options.max_retries, partial=options.partial)
        self._counters = ExecutorCounters()
        self._scorer = AbstainingScorer(scorer, self._counters)
        self._gate = AdmissionGate(max_staleness=options.max_staleness, groups_per_step=options.groups_per_step)
        self._buffer = TrajectoryBuffer(
            max_staleness=options.max_staleness, on_stale=self._drop_stale, version_steps=version_steps
        )
        self._permits = Permits(options.concurrency)
        self._in_flight: dict[str, GroupInFlight] = {}
        self._source: PromptSource | None = None
        self._exhausted = False
        self._next_step = 1
        self._barren = 0
        self._evaluated = 0
        self._failure: Exception | None = None
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._runner: GroupRunner | None = None

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise ExecutorClosed("an executor is entered once")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        options = self._options
        limits = GenerationLimits(
            request_timeout_s=options.request_timeout_s,
            lease_timeout_s=options.lease_timeout_s,
            trajectory_timeout_s=options.trajectory_timeout_s,
            abort_timeout_s=options.abort_timeout_s,
        )
        watch = RevocationWatch(self._tasks)
        generator = TrajectoryGenerator(self._leases, self._client, self._policy, limits, self._counters, watch)
        self._runner = GroupRunner(
            generator,
            self._scorer,
            self._version_steps,
            max_context=options.max_context,
            max_prompt_tokens=options.max_prompt_tokens,
            filter_zero_variance=options.filter_zero_variance,
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what is in flight and abort it on its engines. Such groups stay `in_flight` in the account."""
        assert self._tasks is not None
        if self._failure is None:
            self._failure = ExecutorClosed("the executor was closed")
        self._wake()
        self._runner = None
        self._tasks.cancel_scope.cancel()
        # Without the body's exception: the group would wrap it, and nothing in the group raises.
        await self._tasks.__aexit__(None, None, None)

    def stream(self, prompts: PromptSource) -> GroupStream:
        """Finished groups, as they finish. May be left by `break` and iterated again, or asked for again.

        Groups taken count towards admission for good, as those of batches do: the caller trains them, and tells
        `mark_trained` (in a Batch of its own making) and `on_published`. Where nobody trains, `max_staleness` None
        lets the stream go on without new weights. Raises StreamBusy while another prompt source is not used up.
        """
        self._attach(prompts, first_step=1)
        return GroupStream(lambda: self._next(self._take_group))

    def batches(self, prompts: PromptSource, *, first_step: int = 1) -> BatchStream:
        """Batches for optimizer steps `first_step`, `first_step + 1`, ... until the prompts are used up.

        Generation begins when the first weights are in service; or when the first batch is asked for, since somebody
        who trains has the weights of step `first_step - 1`. Asked for again with the same prompts it goes on where it
        was, whatever `first_step` says. Raises StreamBusy while another prompt source is not used up.
        """
        self._attach(prompts, first_step=first_step)
        return BatchStream(lambda: self._next(self._take_batch))

    def on_published(self, step: int) -> None:
        """Every engine in service has weights of optimizer step `step` or newer: admit more groups, give up those too
        old to be trained.
        """
        self._gate.published(step)
        max_staleness = self._options.max_staleness
        for group in list(self._in_flight.values()):
            oldest = group.oldest_version
            if max_staleness is None or oldest is None:
                continue
            if step - self._version_steps(oldest) > max_staleness:
                group.cancel(GroupEnd("dropped", "stale"))
        self._wake()

    def mark_trained(self, batch: Batch) -> None:
        """Record that the batch was trained. A group that has its outcome already is refused and counted."""
        for group in batch.groups:
            if self.account.train(group.group_id):
                self._journal.ended(group.group_id, "trained", None, batch.step)
            else:
                log.error("group_trained_twice", group=group.group_id, step=batch.step)

    async def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
        """One scored trajectory per prompt, in order; any number of prompts. Not part of the group account.

        A prompt that is too long gets an empty response without a reward. Raises TrajectoryFailed when a prompt
        cannot be answered, and FleetDegraded when no engine is left.
        """
        runner = self._entered()
        first = self._evaluated
        self._evaluated += len(prompts)
        concurrency = self._options.concurrency or _DEFAULT_EVALUATION_CONCURRENCY
        return await sample_all(runner, prompts, sampling, first_number=first, concurrency=concurrency)

    def statistics(self) -> ExecutorStatistics:
        """Counters since the executor was made."""
        return self._counters.snapshot()

    # Dispatching

    def _entered(self) -> GroupRunner:
        if self._runner is None:
            raise ExecutorClosed("the executor is used outside its `async with` block")
        return self._runner

    def _attach(self, prompts: PromptSource, first_step: int) -> None:
        self._entered()
        if prompts is self._source:
            return
        if self._source is not None and not (self._exhausted and not self._in_flight):
            raise StreamBusy("another prompt source is still being streamed")
        if self._source is None:
            self._next_step = first_step
            self._gate.start_lineage(first_step - 1)
        self._source = prompts
        self._exhausted = False
        self._start(lambda: self._dispatch(prompts), "dispatcher")

    async def _dispatch(self, prompts: PromptSource) -> None:
        size = self._options.group_size
        while self._failure is None:
            if not self._gate.is_open():
                await self._gate.changed()
            elif not self._permits.has_room(size):
                await self._permits.freed()
            elif (prompt := prompts.next()) is None:
                self._exhausted = True
                self._wake()
                return
            else:
                self._dispatch_group(prompt, prompts.position)
                # Prompts that are dropped at once must not keep the event loop from everybody else.
                await checkpoint()

    def _dispatch_group(self, prompt: Prompt, cursor: int) -> None:
        runner = self._entered()
        group = GroupInFlight(self._journal.next_group_number, prompt, self._options.group_size)
        self._journal.dispatched(group.group_id, group.number, prompt.index, cursor)
        self.account.dispatch(group.group_id)
        self._gate.take()
        if runner.is_too_long(prompt):
            self._end(group.group_id, GroupEnd("dropped", "prompt_too_long"))
            return
        self._permits.take(group.permits)
        self._in_flight[group.group_id] = group
        self._start(lambda: self._run_group(runner, group), group.group_id)

    async def _run_group(self, runner: GroupRunner, group: GroupInFlight) -> None:
        def give_back_one() -> None:
            group.permits -= 1
            self._permits.give_back(1)

        try:
            result = await runner.run(group, self._options.sampling, self._options.group_size, give_back_one)
        finally:
            del self._in_flight[group.group_id]
            self._permits.give_back(group.permits)  # of trajectories that never began
        if isinstance(result, GroupEnd):
            self._end(group.group_id, result)
            return
        self.account.buffer(group.group_id)
        self._journal.finished(result)
        self._buffer.put(result)
        self._wake()

    def _drop_stale(self, group: Group) -> None:
        self._end(group.group_id, GroupEnd("dropped", "stale"))

    def _end(self, group_id: str, end: GroupEnd) -> None:
        """Give a group its outcome, untrained, and its place in the admission to another."""
        self.account.finish(group_id, end.outcome, end.reason)
        self._journal.ended(group_id, end.outcome, end.reason, None)
        log.info("group_ended", group=group_id, outcome=end.outcome, reason=end.reason)
        self._barren += 1
        self._gate.give_back()
        self._wake()
        if self._barren > self._options.max_barren_groups:
            ends = [
                f"{count} {outcome}({reason})"
                for outcome, reasons in self.account.reasons.items()
                for reason, count in reasons.most_common()
            ]
            raise NoUsableGroups(
                f"the last {self._barren} groups were all filtered, dropped or failed, this one as "
                f"{end.outcome}({end.reason}); so far {', '.join(ends)}",
                groups=self._barren,
            )

    def _start(self, body: Callable[[], Awaitable[None]], name: str) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(self._supervise, body, name=name)

    async def _supervise(self, body: Callable[[], Awaitable[None]]) -> None:
        """The boundary of the executor's own tasks: an error is kept for the reader, instead of cancelling it."""
        try:
            await body()
        except Exception as error:  # noqa: BLE001 - recorded, and raised by the reader from its cause
            cause = first_error(error)
            if self._failure is None:
                self._failure = cause
                log.error("rollouts_failed", error=repr(cause))
            self._wake()

    # Reading

    async def _next(self, take: Callable[[], Item | None]) -> Item | None:
        """Wait for an item; None when the prompts are used up and nothing more will come of them."""
        if self._gate.published_step is None:
            self._gate.published(self._next_step - 1)
        while True:
            if self._failure is not None:
                raise RolloutFailed(f"no more groups will come: {self._failure}") from self._failure
            item = take()
            if item is not None:
                self._barren = 0
                return item
            if self._exhausted and not self._in_flight:
                return None
            starved = not self._in_flight and not self._gate.is_open()
            with anyio.move_on_after(self._options.publish_timeout_s if starved else math.inf) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                waited_for = f"weights in service newer than those of step {self._gate.published_step}"
                raise WaitTimeout(
                    f"no {waited_for} within {self._options.publish_timeout_s} s; {self.account.buffered} groups are "
                    f"buffered or handed out and not marked trained",
                    waited_for=waited_for,
                )

    def _take_group(self) -> Group | None:
        group = self._buffer.take(self._gate.published_step or 0)
        if group is not None:
            self._gate.hand_out(1)
        return group

    def _take_batch(self) -> Batch | None:
        batch = self._buffer.take_batch(self._next_step, self._options.groups_per_step)
        if batch is not None:
            self._next_step += 1
            self._gate.hand_out(len(batch.groups))
        return batch

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def first_error(error: BaseException) -> Exception:
    """The first error inside (nested) exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
