"""Losses, advantages, KL and corrections written from their papers, in numpy and plain loops, without a look at ours.

Tokens of a micro-batch are given as flat arrays with `owner[t]`, the sequence of token t. What the papers write as a
mean over sequences is computed sequence by sequence, and gradients by central differences wherever the paper's
objective is a plain function of the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LIMIT = 20.0
"""Log-ratios beyond this are taken for this: documented in `miles.algorithms.tokens`."""


def capped_exp(value: float) -> float:
    return math.exp(max(-LIMIT, min(LIMIT, value)))


def clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def numeric_gradient(objective: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    gradient = np.zeros_like(at)
    for index in range(len(at)):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (objective(up) - objective(down)) / (2 * step)
    return gradient


# Losses of tokens: what is minimised.


def ppo_loss(logprobs: Array, old: Array, advantages: Array, low: float, high: float, dual: float | None) -> Array:
    losses = []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = capped_exp(new - before)
        objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        losses.append(-objective)
    return np.array(losses, dtype=np.float64)


def gspo_loss_of_sequences(
    logprobs: Array, old: Array, advantages: Array, owner: Sequence[int], low: float, high: float
) -> float:
    """The paper's objective, negative: the mean over sequences of min(s A, clip(s) A), A one number a sequence."""
    total, sequences = 0.0, sorted(set(owner))
    for sequence in sequences:
        tokens = [t for t in range(len(owner)) if owner[t] == sequence]
        score = capped_exp(sum(logprobs[t] - old[t] for t in tokens) / len(tokens))
        advantage = advantages[tokens[0]]
        total -= min(score * advantage, clip(score, 1 - low, 1 + high) * advantage)
    return total / len(sequences) if sequences else 0.0


def cispo_gradient(logprobs: Array, old: Array, advantages: Array, low: float, high: float) -> Array:
    """Of each token's loss: the clipped ratio is a constant there."""
    return np.array(
        [
            -clip(capped_exp(new - before), 1 - low, 1 + high) * advantage
            for new, before, advantage in zip(logprobs, old, advantages, strict=True)
        ],
        dtype=np.float64,
    )


# KL(policy || reference) estimated from one token.


def kl_estimate(name: str, policy: float, reference: float) -> float:
    if name == "k1":
        return policy - reference
    if name == "k2":
        return 0.5 * (policy - reference) ** 2
    return math.exp(reference - policy) - 1 - (reference - policy)


# Corrections: what each token's loss is multiplied by.


def correction(
    name: str, proximal: Array, behaviour: Array, owner: Sequence[int], **options: float | str | None
) -> Array:
    weights = []
    for t in range(len(owner)):
        of = [t]
        if options.get("level") == "sequence":
            of = [u for u in range(len(owner)) if owner[u] == owner[t]]
        rho = capped_exp(sum(proximal[u] - behaviour[u] for u in of))
        if name in ("tis", "decoupled"):
            cap = options["cap"]
            weights.append(rho if cap is None else min(rho, float(cap)))
        else:
            low, high = options["low"], options["high"]
            weights.append(rho if float(low or 0) <= rho <= float(high or 0) else 0.0)
    return np.array(weights, dtype=np.float64)


# Advantages. A group is a list of rewards, None (or NaN) where the verifier abstained.

Rewards = Sequence[float | None]


def valid(group: Rewards) -> list[float]:
    return [reward for reward in group if reward is not None and math.isfinite(reward)]


def grpo_advantages(group: Rewards, eps: float, by_std: bool) -> list[float]:
    rewards = valid(group)
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + eps) if by_std else r - mean for r in rewards]


def rloo_advantages(group: Rewards, eps: float, by_std: bool) -> list[float]:
    rewards, result = valid(group), []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        if not others:
            result.append(0.0)
            continue
        mean = sum(others) / len(others)
        std = math.sqrt(sum((r - mean) ** 2 for r in others) / len(others))
        same = max(others) == min(others)
        result.append((reward - mean) / (std + eps) if by_std and not same else reward - mean)
    return result


def reinforce_plus_plus_advantages(
    groups: Sequence[Rewards], penalties: Sequence[Sequence[Sequence[float]]], eps: float, with_baseline: bool
) -> list[list[list[float]]]:
    """`penalties[g][i]` has one number for each token of valid sample i of group g."""
    raw = []
    for group, costs in zip(groups, penalties, strict=True):
        rewards = valid(group)
        baseline = sum(rewards) / len(rewards) if with_baseline and rewards else 0.0
        raw.append(
            [[r - baseline - sum(cost[t:]) for t in range(len(cost))] for r, cost in zip(rewards, costs, strict=True)]
        )
    tokens = np.array([value for group in raw for sample in group for value in sample])
    if not len(tokens) or tokens.max() - tokens.min() < 1e-6:
        return [[[0.0] * len(sample) for sample in group] for group in raw]
    mean, std = tokens.mean(), tokens.std()
    return [[[float((v - mean) / (std + eps)) for v in sample] for sample in group] for group in raw]


# The mean that the losses of a batch are part of. `losses[g][i]` are those of the tokens of sequence i of group g.


def aggregate(name: str, losses: Sequence[Sequence[Sequence[float]]], max_tokens: int) -> float:
    sequences = [sample for group in losses for sample in group if sample]
    if name == "token_mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    if name == "sequence_mean":
        return sum(sum(sample) / len(sample) for sample in sequences) / len(sequences)
    if name == "sequence_sum":
        return sum(sum(sample) / max_tokens for sample in sequences) / len(sequences)
    groups = [group for group in losses if any(group)]
    return sum(sum(map(sum, group)) / sum(map(len, group)) for group in groups) / len(groups)


def overlong_reward(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0
