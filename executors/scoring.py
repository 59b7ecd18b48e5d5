"""Rewards under a deadline. A scorer that raises, hangs or answers nonsense abstains; it never scores 0.

Called once per finished trajectory, after its engine slot has been given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import structlog

from executors.ports import RewardScorer
from executors.statistics import ExecutorCounters
from executors.trajectory import Prompt

log = structlog.get_logger(__name__)


class DeadlineScorer:
    """A RewardScorer around another one. It does not raise."""

    def __init__(self, scorer: RewardScorer, counters: ExecutorCounters, timeout_s: float) -> None:
        self._scorer = scorer
        self._counters = counters
        self._timeout_s = timeout_s

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        """A finite reward, or None."""
        reward = await self._ask(prompt, response_ids)
        if reward is None:
            self._counters.abstained += 1
        return reward

    async def _ask(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        with anyio.CancelScope(deadline=anyio.current_time() + self._timeout_s):
            try:
                reward = await self._scorer.score(prompt, response_ids)
                if reward is None:
                    return None
                if math.isfinite(reward):
                    return float(reward)
                error: Exception = ValueError(f"reward {reward} is not finite")
            except Exception as raised:  # noqa: BLE001 - a person's own code; recorded, and the sample abstains
                error = raised
            self._counters.reward_errors += 1
            log.warning("reward_error", prompt_index=prompt.index, error=repr(error))
            return None
        self._counters.reward_timeouts += 1
        log.warning("reward_timeout", prompt_index=prompt.index, timeout_s=self._timeout_s)
        return None
