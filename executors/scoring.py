"""Whatever a scorer does, a sample has a finite reward or none: one that raises or answers nonsense abstains.

Called once per finished trajectory, after its engine slot has been given back. There is no deadline here: the scorer
alone knows when a call stops waiting for its turn and begins to work, and bounds it (see `RewardScorer`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import structlog

from executors.ports import RewardScorer
from executors.statistics import ExecutorCounters
from executors.trajectory import Prompt

log = structlog.get_logger(__name__)


class AbstainingScorer:
    """A RewardScorer around another one. It does not raise, and never makes a failure a score of 0."""

    def __init__(self, scorer: RewardScorer, counters: ExecutorCounters) -> None:
        self._scorer = scorer
        self._counters = counters

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        """A finite reward, or None."""
        try:
            reward = await self._scorer.score(prompt, response_ids)
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"reward {reward} is not finite")
        except Exception as error:  # noqa: BLE001 - a person's own code; recorded, and the sample abstains
            self._counters.reward_errors += 1
            log.warning("reward_error", prompt_index=prompt.index, error=repr(error))
            reward = None
        if reward is None:
            self._counters.abstained += 1
            return None
        return float(reward)
