"""From groups of trajectories to sequences with advantages: the torch-free half of an RL step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executors.trajectory import Batch
from miles.algorithms.advantages import group_advantages
from miles.trainer.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class RlBatch:
    """Sequences to train on, and what the rollouts looked like. Means are over all trajectories of the batch."""

    sequences: tuple[TokenSequence, ...]
    reward_mean: float
    """Over trajectories with a reward; nan without any."""
    response_length_mean: float
    abstained: int
    """Trajectories without a finite reward."""
    flat_groups: int
    """Groups whose advantages are all 0: they teach nothing."""


def prepare(batch: Batch, advantage: Callable[..., Sequence[float]], options: Mapping[str, object]) -> RlBatch:
    """Advantages per group; samples that take no part are left out."""
    sequences: list[TokenSequence] = []
    rewards: list[float] = []
    lengths: list[int] = []
    flat_groups = 0
    for group in batch.groups:
        members = group.trajectories
        advantages = group_advantages(
            [member.reward for member in members], [bool(member.response_ids) for member in members], advantage, options
        )
        flat_groups += not any(advantages)
        for member, value in zip(members, advantages, strict=True):
            lengths.append(len(member.response_ids))
            if member.reward is not None and math.isfinite(member.reward):
                rewards.append(member.reward)
            if value is not None:
                spread = [value] * len(member.response_ids)
                sequences.append(TokenSequence(member.prompt_ids, member.response_ids, member.logprobs, spread))
    return RlBatch(
        sequences=tuple(sequences),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else math.nan,
        response_length_mean=sum(lengths) / len(lengths) if lengths else math.nan,
        abstained=len(lengths) - len(rewards),
        flat_groups=flat_groups,
    )
