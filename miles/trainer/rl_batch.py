"""From groups of trajectories to sequences with advantages and weights: the torch-free half of an RL step.

Everything that depends on the whole batch is decided here (baselines, normalisation, the mean that losses are part
of), so how the sequences are then cut and spread never matters. Called by the learner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from executors.trajectory import Batch, Trajectory
from miles.algorithms import registry
from miles.algorithms.advantages.batch import batch_advantages, takes_part
from miles.algorithms.advantages.sample import Sample
from miles.algorithms.options import AlgorithmOptions, KlOptions
from miles.algorithms.overlong import overlong_penalty
from miles.algorithms.tokens import MAX_LOG_RATIO
from miles.trainer.rollout_metrics import rollout_metrics
from miles.trainer.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class RlBatch:
    """Sequences to train on, and what the rollouts looked like."""

    sequences: tuple[TokenSequence, ...]
    metrics: dict[str, float]
    """See `miles.trainer.rollout_metrics`."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One trajectory with what each of its tokens has of its own."""

    trajectory: Trajectory
    staleness: list[int]
    mask: list[bool]
    reference: Sequence[float] | None
    sample: Sample | None


def sampled_sequences(batch: Batch) -> list[TokenSequence | None]:
    """All trajectories, group after group, None for an empty response: what reference logprobs are asked for.

    With their kept sets and experts, as their own logprobs are: a KL compares within the same set.
    """
    return [
        TokenSequence(one.prompt_ids, one.response_ids, kept=one.kept, routing=one.routing)
        if one.response_ids
        else None
        for group in batch.groups
        for one in group.trajectories
    ]


def prepare(
    batch: Batch, options: AlgorithmOptions, reference_logprobs: Sequence[Sequence[float]] | None = None
) -> RlBatch:
    """Advantages, masks, staleness and weights of all sequences that take part; the other samples are left out.

    `reference_logprobs` are those of `sampled_sequences(batch)`, [] for an empty response; needed only with a KL,
    wherever it has its place. Raises ValueError where they are missing or do not fit.
    """
    members = _members(batch, options, reference_logprobs)
    advantages = batch_advantages(
        [[member.sample for member in group] for group in members],
        registry.load("advantage", options.advantage, options.advantage_options),
    )
    flat = [member for group in members for member in group]
    values = [each for group in advantages for each in group]
    weights = iter(_weights(members, options))
    sequences: list[TokenSequence] = []
    for member, value in zip(flat, values, strict=True):
        if value is None:
            continue
        spread = iter(value)
        sequences.append(
            TokenSequence(
                member.trajectory.prompt_ids,
                member.trajectory.response_ids,
                member.trajectory.logprobs,
                [next(spread) if trained else 0.0 for trained in member.mask],
                None if all(member.mask) else member.mask,
                member.staleness,
                next(weights),
                member.trajectory.kept,
                member.trajectory.routing,
                member.reference,
            )
        )
    metrics = rollout_metrics([member.trajectory for member in flat], [member.staleness for member in flat], advantages)
    penalties = [penalty for member in flat if member.sample is not None for penalty in member.sample.penalties]
    if options.kl is not None and options.kl.coefficient and penalties:
        metrics["kl"] = math.fsum(penalties) / len(penalties) / options.kl.coefficient
    return RlBatch(tuple(sequences), metrics)


def token_staleness(trajectory: Trajectory, batch: Batch, group_staleness: int) -> list[int]:
    """Optimizer steps between the weights that sampled each response token and those about to be updated.

    A version whose step the batch does not know counts as the group's oldest.
    """
    result = [group_staleness] * len(trajectory.response_ids)
    for span in trajectory.spans:
        if span.version in batch.version_steps:
            age = batch.step - 1 - batch.version_steps[span.version]
            result[span.start : span.end] = [age] * (span.end - span.start)
    return result


def _members(
    batch: Batch, options: AlgorithmOptions, reference: Sequence[Sequence[float]] | None
) -> list[list[_Member]]:
    if options.kl is not None and reference is None:
        raise ValueError("a KL penalty needs the reference model's logprobs")
    total = sum(len(group.trajectories) for group in batch.groups)
    if reference is not None and len(reference) != total:
        raise ValueError(f"reference logprobs of {len(reference)} trajectories for a batch of {total}")
    rows = iter(reference if reference is not None else [None] * total)
    return [
        [_member(member, batch, age, options, next(rows)) for member in group.trajectories]
        for group, age in zip(batch.groups, batch.staleness, strict=True)
    ]


def _member(
    trajectory: Trajectory,
    batch: Batch,
    group_staleness: int,
    options: AlgorithmOptions,
    reference: Sequence[float] | None,
) -> _Member:
    if reference is not None and len(reference) != len(trajectory.response_ids):
        raise ValueError(f"{len(trajectory.response_ids)} response tokens but {len(reference)} reference logprobs")
    staleness = token_staleness(trajectory, batch, group_staleness)
    oldest = options.max_token_staleness
    mask = [oldest is None or age <= oldest for age in staleness]
    if trajectory.mask is not None:
        mask = [a and b for a, b in zip(mask, trajectory.mask, strict=True)]
    penalties: tuple[float, ...] = ()
    if options.kl is not None and options.kl.place == "reward" and reference is not None:
        penalties = tuple(compress(_penalties(trajectory.logprobs, reference, options.kl), mask))
    sample = None
    if trajectory.reward is not None and takes_part(trajectory.reward, sum(mask)):
        reward = trajectory.reward
        if options.overlong is not None:
            reward -= overlong_penalty(
                len(trajectory.response_ids),
                max_tokens=options.max_tokens,
                buffer=options.overlong.buffer,
                penalty=options.overlong.penalty,
            )
        sample = Sample(reward, sum(mask), penalties)
    return _Member(trajectory, staleness, mask, reference, sample)


def _penalties(logprobs: Sequence[float], reference: Sequence[float], kl: KlOptions) -> list[float]:
    """kl.coefficient times the estimated KL of each response token, from the policy that sampled it to the reference.

    Source of a KL by token in the reward: InstructGPT (arXiv 2203.02155).
    """
    estimate = registry.load("kl", kl.estimator)
    differences = [a - b for a, b in zip(logprobs, reference, strict=True)]
    return [kl.coefficient * estimate(min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO)) for x in differences]


def _weights(members: Sequence[Sequence[_Member]], options: AlgorithmOptions) -> list[float]:
    """What each token's loss is multiplied by, for each sequence that takes part."""
    counts = [[member.sample.tokens for member in group if member.sample is not None] for group in members]
    if not any(counts):
        return []
    weights = registry.load("aggregation", options.aggregation)(counts, max_tokens=options.max_tokens)
    if [len(group) for group in weights] != [len(group) for group in counts]:
        raise ValueError(f"the aggregation {options.aggregation!r} answered for other sequences than it was given")
    return [float(weight) for group in weights for weight in group]
