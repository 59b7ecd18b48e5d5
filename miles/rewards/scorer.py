"""Scores responses: what the rollout executor calls for every finished trajectory.

Invariant: a failure of the verifier is an abstention (None) with a reason that is counted, never a silent 0, and the
event loop goes on whatever a person's function does. The assembly owns it, in an `async with`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import anyio
import structlog

from controllers.errors import ActorDied, WaitTimeout
from executors.trajectory import Prompt
from miles.rewards.reward import Place, Reward
from miles.rewards.verdict import Answer, Verdict, describe, judge
from miles.rewards.worker_process import WorkerPool

log = structlog.get_logger(__name__)


class TextDecoder(Protocol):
    """The part of a tokenizer that rewards need."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, special tokens left out."""


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """How a person's own reward function is run; the built-in ones are called in place."""

    timeout_s: float = 30.0
    """How long one call may take."""
    workers: int = 2
    """Processes at most for a plain function; a coroutine function runs in the driver."""
    start_timeout_s: float = 120.0
    """How long a worker may take to import the function's module."""


@dataclass(frozen=True, slots=True)
class ScorerStatistics:
    """Counts since the start. `abstained` is by reason: the values of `Verdict` except `scored`."""

    scored: int
    abstained: Mapping[str, int]


class Scorer:
    """Scores with one reward. Calls may run at the same time."""

    def __init__(self, reward: Reward, decoder: TextDecoder, options: ScorerOptions | None = None) -> None:
        self._reward = reward
        self._decoder = decoder
        self._options = options or ScorerOptions()
        self._pool = WorkerPool(
            reward.name,
            size=self._options.workers,
            call_timeout_s=self._options.timeout_s,
            start_timeout_s=self._options.start_timeout_s,
        )
        self._scored = 0
        self._abstained: Counter[str] = Counter()

    async def __aenter__(self) -> Scorer:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        """The reward of a response, a finite number; None, counted by its reason, where there is none."""
        reason, value = await self._verdict(prompt, self._decoder.decode(response_ids))
        if isinstance(value, float):
            self._scored += 1
            return value
        self._abstained[reason.value] += 1
        count = self._abstained[reason.value]
        if count & (count - 1) == 0:  # at 1, 2, 4, 8...: a reward that always fails must not flood the log
            name = self._reward.name
            log.warning("reward_abstained", reward=name, reason=reason, detail=value, prompt=prompt.index, count=count)
        return None

    def statistics(self) -> ScorerStatistics:
        """What became of the calls so far."""
        return ScorerStatistics(self._scored, dict(self._abstained))

    async def _verdict(self, prompt: Prompt, response: str) -> Answer:
        call = (prompt.text, response, prompt.label, prompt.extra)
        try:
            match self._reward.place:
                case Place.INLINE:
                    return judge(self._reward.call(*call))
                case Place.LOOP:
                    return await self._await_in_loop(*call)
                case Place.PROCESS:
                    return await self._pool.call(call)
        except WaitTimeout as error:
            return Verdict.TIMEOUT, error.message
        except ActorDied as error:
            return Verdict.CRASHED, error.message
        except Exception as error:  # noqa: BLE001 - whatever a verifier raises is counted and logged by `score`
            return Verdict.ERROR, describe(error)

    async def _await_in_loop(self, prompt: str, response: str, label: str, extra: Mapping[str, Any]) -> Answer:
        value: object = None
        with anyio.move_on_after(self._options.timeout_s) as scope:
            value = await self._reward.call(prompt, response, label, extra)  # type: ignore[misc]  # place says awaitable
        if scope.cancelled_caught:
            raise WaitTimeout(f"the reward took over {self._options.timeout_s} s", waited_for="the reward function")
        return judge(value)
