"""Ranks that share a model and a batch compute what one plain PyTorch loop over transformers computes, in fp32.

Logits, logprobs, gradients, loss and gradient norm of packed sequences in several micro-batches, and parameters after
three optimizer steps with clipping at work. Every rank's every box is compared, so replicas agree too. Differences
are near 1e-6; the controls show that each kind of mistake is far outside the tolerance.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles.trainer.schedule import learning_rate
from miles.trainer.options import TrainerOptions
from miles.trainer.parallel import ParallelSizes, Place
from tests.miles.trainer import rank_calls
from tests.miles.trainer.plain_loop import PlainRun, plain_run, response_logits, response_logprobs
from tests.miles.trainer.rank_calls import RankRun
from tests.miles.trainer.tiny import VOCAB, random_batch, reference, write_model
from tests.support.ranks import Ranks, ranks

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
CLIP = 0.05
BATCHES = [random_batch(step, groups=3, group_size=4) for step in (1, 2, 3)]
MEMBERS = [member for group in BATCHES[0].groups for member in group.trajectories]

TP, TP_SP = ParallelSizes(tensor=2), ParallelSizes(tensor=2, sequence=True)
PP, DP = ParallelSizes(pipeline=2), ParallelSizes(data=2)
EP = ParallelSizes(data=2, expert=2)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks(2) as group:
        yield group


class Models:
    """Model folders and what the plain loop makes of them, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, bool], tuple[TrainerOptions, PlainRun]] = {}

    def of(self, kind: str, tied: bool) -> tuple[TrainerOptions, PlainRun]:
        if (kind, tied) not in self._made:
            path = write_model(self._folder / f"{kind}-{tied}", kind, tied=tied)
            options = TrainerOptions(path, lr=1e-3, lr_warmup_steps=2, clip_grad=CLIP, micro_batch_tokens=30)
            run = plain_run(path, BATCHES, lambda step: learning_rate(options, step), CLIP)
            self._made[kind, tied] = options, run
        return self._made[kind, tied]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def with_sizes(options: TrainerOptions, sizes: ParallelSizes) -> TrainerOptions:
    import dataclasses

    return dataclasses.replace(options, parallel=sizes)


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
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


def check(runs: list[RankRun], options: TrainerOptions, plain: PlainRun, sizes: ParallelSizes) -> None:
    assert logit_error(runs, sizes, options.model_path) < TOLERANCE
    model = reference(options.model_path)
    for run in runs:
        for member, values in zip(MEMBERS, run.logprobs, strict=True):
            assert float((response_logprobs(model, member).detach() - torch.tensor(values)).abs().max()) < TOLERANCE
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


CASES = {
    "qwen3-tp": ("qwen3", True, TP),
    "qwen3-tp-sp": ("qwen3", True, TP_SP),
    "qwen3-pp-tied": ("qwen3", True, PP),
    "qwen3-pp-untied": ("qwen3", False, PP),
    "qwen3-dp": ("qwen3", True, DP),
    "qwen2-tp-sp": ("qwen2", False, TP_SP),
    "qwen2-pp": ("qwen2", True, PP),
    "llama-tp": ("llama3", False, TP),
    "llama-dp": ("llama", True, DP),
    "gemma-tp-sp": ("gemma", True, TP_SP),
    "gemma-pp": ("gemma", True, PP),
    "moe-ep": ("qwen3_moe", False, EP),
    "moe-dp": ("qwen3_moe", False, DP),
    "moe-tp-sp": ("qwen3_moe", False, TP_SP),
    "moe-pp": ("qwen3_moe", True, PP),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_a_plain_loop(pair: Ranks, models: Models, case: str) -> None:
    kind, tied, sizes = CASES[case]
    options, plain = models.of(kind, tied)
    check(pair.run_as(sizes, rank_calls.run_learner, with_sizes(options, sizes), BATCHES), options, plain, sizes)
