"""Makes one group: all samples of one prompt, dispatched together, scored, and judged as a whole.

A group with a sample that was given up ends as that sample does, and its siblings are aborted; nothing of it is
trained. Called by the executor, which owns the account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import anyio

from executors.errors import TrajectoryFailed
from executors.generation import TrajectoryGenerator
from executors.generation_stream import GenerationStream
from executors.group_account import Outcome
from executors.sampling_client import SamplingParams
from executors.scoring import AbstainingScorer
from executors.trajectory import Group, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a group ended that will not be trained."""

    outcome: Outcome
    reason: str


class GroupInFlight:
    """A group on its way. `end` set from outside (with the scope cancelled) ends it early."""

    __slots__ = ("end", "group_id", "number", "permits", "prompt", "scope", "streams")

    def __init__(self, number: int, prompt: Prompt, permits: int) -> None:
        self.number = number
        self.group_id = f"g{number:010d}"
        self.prompt = prompt
        self.permits = permits
        """Trajectories that still count against the concurrency bound."""
        self.streams: list[GenerationStream] = []
        self.scope = anyio.CancelScope()
        self.end: GroupEnd | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that may have sampled a token of it so far, None before the first token."""
        return min((v for s in self.streams if (v := s.oldest_version) is not None), default=None)

    def cancel(self, end: GroupEnd) -> None:
        """End it early as `end`; the first word counts."""
        if self.end is None:
            self.end = end
        self.scope.cancel()


class GroupRunner:
    """Turns prompts into finished groups."""

    def __init__(
        self,
        generator: TrajectoryGenerator,
        scorer: AbstainingScorer,
        version_steps: Callable[[int], int],
        *,
        max_context: int,
        max_prompt_tokens: int | None,
        filter_zero_variance: bool,
    ) -> None:
        self._generator = generator
        self._scorer = scorer
        self._version_steps = version_steps
        self._max_context = max_context
        self._max_prompt_tokens = max_prompt_tokens
        self._filter_zero_variance = filter_zero_variance

    def is_too_long(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves no room for a token, or is longer than prompts may be."""
        length = len(prompt.ids)
        return length >= self._max_context or (self._max_prompt_tokens is not None and length > self._max_prompt_tokens)

    async def run(
        self, group: GroupInFlight, sampling: SamplingParams, size: int, on_generated: Callable[[], None]
    ) -> Group | GroupEnd:
        """Generate and score `size` samples. `on_generated` is called as each gives its engine slot back."""
        group.streams = [self.new_stream(group.prompt, sampling) for _ in range(size)]
        samples: list[Trajectory | None] = [None] * size

        async def one(sample: int) -> None:
            name = f"{group.group_id}-s{sample:03d}"
            try:
                samples[sample] = await self.sample(name, group.prompt, group.streams[sample], sampling, on_generated)
            except TrajectoryFailed as error:
                group.cancel(GroupEnd(error.outcome, error.reason))

        with group.scope:
            async with anyio.create_task_group() as tasks:
                for sample in range(size):
                    tasks.start_soon(one, sample, name=group.group_id)
        if group.end is not None:
            return group.end
        return self._judge(group, [sample for sample in samples if sample is not None])

    async def sample(
        self,
        name: str,
        prompt: Prompt,
        stream: GenerationStream,
        sampling: SamplingParams,
        on_generated: Callable[[], None] | None = None,
    ) -> Trajectory:
        """Generate and score one trajectory. Raises TrajectoryFailed."""
        try:
            stop_reason = await self._generator.generate(name, stream, sampling)
        finally:
            if on_generated is not None:
                on_generated()
        trajectory = stream.trajectory(stop_reason)
        reward = await self._scorer.score(prompt, trajectory.response_ids)
        return trajectory if reward is None else replace(trajectory, reward=reward)

    def new_stream(self, prompt: Prompt, sampling: SamplingParams) -> GenerationStream:
        """An empty response whose budget respects both `max_new_tokens` and the context."""
        budget = min(sampling.max_new_tokens, self._max_context - len(prompt.ids))
        return GenerationStream(prompt.ids, budget, sampling.stop_token_ids)

    def _judge(self, group: GroupInFlight, samples: Sequence[Trajectory]) -> Group | GroupEnd:
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if not rewards:
            return GroupEnd("filtered", "no_reward")
        if self._filter_zero_variance and max(rewards) == min(rewards):
            return GroupEnd("filtered", "zero_variance")
        return Group(
            group_id=group.group_id,
            prompt=group.prompt,
            trajectories=tuple(samples),
            sampled_step=min(self._version_steps(version) for version in {s.oldest_version for s in samples}),
        )
