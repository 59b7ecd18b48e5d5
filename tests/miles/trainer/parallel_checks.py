"""Parallel ranks against the plain loop: the models, what the loop makes of them, and how far ranks are from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executors.trajectory import Batch, Trajectory
from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.schedule import learning_rate
from tests.miles.trainer.plain_loop import PlainRun, plain_run, response_logits, response_logprobs
from tests.miles.trainer.rank_calls import RankRun
from tests.miles.trainer.tiny import VOCAB, random_batch, reference, write_model

TOLERANCE = 1e-5
CLIP = 0.05
ADAMW: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1, "clip_grad": CLIP}
"""None is a default, of ours or of torch's: an optimizer that left one out would be seen."""


def with_context(batch: Batch) -> Batch:
    """The same batch, where the first token of every other longer response is context only, as a tool's answer is."""

    def changed(member: Trajectory) -> Trajectory:
        count = len(member.response_ids)
        return dataclasses.replace(member, mask=(False,) + (True,) * (count - 1)) if count > 1 else member

    groups = [
        dataclasses.replace(
            group, trajectories=tuple(changed(one) if i % 2 else one for i, one in enumerate(group.trajectories))
        )
        for group in batch.groups
    ]
    return dataclasses.replace(batch, groups=tuple(groups))


BATCHES = [with_context(random_batch(step, groups=3, group_size=4)) for step in (1, 2, 3)]
MEMBERS = [member for group in BATCHES[0].groups for member in group.trajectories]

TP, TP_SP = ParallelSizes(tensor=2), ParallelSizes(tensor=2, sequence=True)
PP, DP = ParallelSizes(pipeline=2), ParallelSizes(data=2)
EP = ParallelSizes(data=2, expert=2)


class Models:
    """Model folders and what the plain loop makes of them, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, bool], tuple[TrainerOptions, PlainRun]] = {}

    def of(self, kind: str, tied: bool) -> tuple[TrainerOptions, PlainRun]:
        """Options for one rank, and the plain run over BATCHES."""
        if (kind, tied) not in self._made:
            path = write_model(self._folder / f"{kind}-{tied}", kind, tied=tied)
            options = TrainerOptions(path, lr=1e-3, lr_warmup_steps=2, micro_batch_tokens=30, **ADAMW)
            run = plain_run(options, BATCHES, lambda step: learning_rate(options, step))
            self._made[kind, tied] = options, run
        return self._made[kind, tied]


def with_sizes(options: TrainerOptions, sizes: ParallelSizes) -> TrainerOptions:
    """The options of ranks that share the work so."""
    return dataclasses.replace(options, parallel=sizes)


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two sets of tensors."""
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def parameter_error(runs: list[RankRun], wanted: dict[str, Tensor]) -> float:
    """Over every box of every rank; together they hold every tensor."""
    assert {name for run in runs for name, _, _ in run.parameters} == set(wanted)
    worst = 0.0
    for run in runs:
        for name, box, tensor in run.parameters:
            part = wanted[name][tuple(slice(start, start + length) for start, length in box)]
            worst = max(worst, float((tensor - part).abs().max()))
    return worst


def logit_error(runs: list[RankRun], sizes: ParallelSizes, folder: Path) -> float:
    """Shards of the last stage put side by side, against transformers one sequence at a time."""
    model = reference(folder)
    wanted = [response_logits(model, member).detach() for member in MEMBERS]
    worst, seen = 0.0, 0
    for data in range(sizes.data):
        last = [Place(sizes, tensor, sizes.pipeline - 1, 0, data).rank for tensor in range(sizes.tensor)]
        for shards in zip(*(runs[rank].logits for rank in last), strict=True):
            logits = torch.cat([shard for _, shard in shards], -1)[:, :VOCAB]
            if indices := shards[0][0]:
                worst = max(worst, float((logits - torch.cat([wanted[index] for index in indices])).abs().max()))
                seen += len(indices)
    assert seen == len(MEMBERS)
    return worst


def logprob_error(run: RankRun, model: Any) -> float:
    """Against transformers."""
    errors = [
        response_logprobs(model, member).detach() - torch.tensor(values)
        for member, values in zip(MEMBERS, run.logprobs, strict=True)
    ]
    return float(torch.cat(errors).abs().max())


def check(runs: list[RankRun], options: TrainerOptions, plain: PlainRun, sizes: ParallelSizes) -> None:
    """All that `RankRun` holds is as the plain run says, on every rank."""
    assert logit_error(runs, sizes, options.model_path) < TOLERANCE
    model = reference(options.model_path)
    for run in runs:
        assert logprob_error(run, model) < TOLERANCE
    assert largest(runs[0].gradients, plain.gradients) < TOLERANCE
    for run in runs:
        assert [metrics["loss"] for metrics in run.metrics] == pytest.approx(plain.losses, abs=TOLERANCE)
        assert [metrics["grad_norm"] for metrics in run.metrics] == pytest.approx(plain.norms, rel=1e-4)
        assert untimed(run) == untimed(runs[0])
    assert min(plain.norms) > CLIP, "clipping must be at work"
    assert parameter_error(runs, plain.after) < TOLERANCE
    assert largest(plain.before, plain.after) > 100 * TOLERANCE


def untimed(run: RankRun) -> list[dict[str, float]]:
    """Metrics without clock readings: the same on every rank."""
    timed = ("_s", "_per_s", "mfu")
    return [{name: value for name, value in one.items() if not name.endswith(timed)} for one in run.metrics]
