"""Ranks that share the tokens of every sequence compute what one plain PyTorch loop over transformers computes.

Differences are near 1e-6; the controls undo one rule each on the ranks, and are far outside the tolerance.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from executors.sampling_record import KeptTokens, Routing
from executors.trajectory import Batch, Trajectory
from miles.trainer import context_parallel, heads, packing
from miles.trainer.context_parallel import own_tokens
from miles.trainer.options import TrainerOptions
from miles.trainer.packing import pack
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.sequences import TokenSequence
from tests.miles.trainer.parallel_checks import (
    BATCHES,
    TOLERANCE,
    Models,
    largest,
    logprob_error,
    parameter_error,
    untimed,
    with_sizes,
)
from tests.miles.trainer.plain_loop import PlainRun
from tests.miles.trainer.rank_calls import RankRun, run_learner
from tests.miles.trainer.tiny import EXPERTS, VOCAB, reference
from tests.support.ranks import Ranks, ranks

CP = ParallelSizes(context=2)
CP_EP = ParallelSizes(context=2, expert=2)


def check(runs: list[RankRun], options: TrainerOptions, plain: PlainRun) -> None:
    """Logprobs, gradients, loss, gradient norm, and parameters after three steps, on every rank."""
    model = reference(options.model_path)
    for run in runs:
        assert logprob_error(run, model) < TOLERANCE
        assert [metrics["loss"] for metrics in run.metrics] == pytest.approx(plain.losses, abs=TOLERANCE)
        assert [metrics["grad_norm"] for metrics in run.metrics] == pytest.approx(plain.norms, rel=1e-4)
        assert untimed(run) == untimed(runs[0])
    assert largest(runs[0].gradients, plain.gradients) < TOLERANCE
    assert parameter_error(runs, plain.after) < TOLERANCE


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "tied", "sizes"),
    [("qwen3", True, CP), ("llama3", False, CP), ("qwen3_moe", False, CP_EP)],
    ids=["qwen3", "llama3", "moe-ep"],
)
def test_two_ranks_equal_a_plain_loop(pair: Ranks, models: Models, kind: str, tied: bool, sizes: ParallelSizes) -> None:
    options, plain = models.of(kind, tied)
    check(pair.run_as(sizes, run_learner, with_sizes(options, sizes), BATCHES), options, plain)


@pytest.mark.real
def test_together_with_every_other_way_to_share(models: Models) -> None:
    options, plain = models.of("qwen3_moe", False)
    with ranks(4) as four:
        for sizes in (
            ParallelSizes(context=2, expert=2, tensor=2, sequence=True),
            ParallelSizes(context=2, pipeline=2),
            ParallelSizes(context=2, data=2, expert=4),
        ):
            check(four.run_as(sizes, run_learner, with_sizes(options, sizes), BATCHES), options, plain)


def run_with_neighbouring_chunks(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: each rank holds two chunks that follow one another, where attention expects mirrored ones."""

    def neighbours(lengths: Sequence[int], size: int, rank: int) -> list[int]:
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        return [
            start + rank * length // size + at
            for start, length in zip(starts, lengths, strict=True)
            for at in range(length // size)
        ]

    return patched(packing, "own_tokens", neighbours, options, batches)


def run_without_summed_gradients(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: keys and values get the gradient of their own rank's queries only."""
    gather = mappings.gather_from_sequence_parallel_region

    def unsummed(values: Tensor, *, group: Any) -> Tensor:
        gathered: Tensor = gather(values, tensor_parallel_output_grad=False, group=group)
        return gathered

    return patched(context_parallel, "gather_from_sequence_parallel_region", unsummed, options, batches)


def run_counting_tokens_twice(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: a token's gradient comes from every rank, though all have the same loss."""

    def twice(values: Tensor, held: Tensor, count: int, group: Any) -> Tensor:
        whole = values.new_zeros((count, *values.shape[1:])).index_copy(0, held, values)
        summed: Tensor = all_reduce(whole, group=group)  # type: ignore[no-untyped-call]
        return summed

    return patched(heads, "spread", twice, options, batches)


def patched(
    owner: Any, name: str, value: Callable[..., Any], options: TrainerOptions, batches: Sequence[Batch]
) -> RankRun:
    with mock.patch.object(owner, name, value):
        return run_learner(options, batches)


@pytest.mark.real
@pytest.mark.parametrize(
    "mistake", [run_with_neighbouring_chunks, run_without_summed_gradients, run_counting_tokens_twice]
)
def test_a_mistake_would_be_seen(pair: Ranks, models: Models, mistake: Callable[..., RankRun]) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(CP, mistake, with_sizes(options, CP), BATCHES[:1])
    assert largest(runs[0].gradients, plain.gradients) > 100 * TOLERANCE


def with_records(batch: Batch) -> Batch:
    """The same batch, of which some members have kept sets and experts."""
    dice = random.Random(batch.step)

    def recorded(member: Trajectory, index: int) -> Trajectory:
        if index % 3 == 2:
            return member
        sets = [{token, *(dice.randrange(VOCAB) for _ in range(6))} for token in member.response_ids]
        kept = KeptTokens(
            array("i", map(len, sets)).tobytes(), array("i", [token for one in sets for token in one]).tobytes()
        )
        tokens = len(member.prompt_ids) + len(member.response_ids) - 1
        chosen = [dice.sample(range(EXPERTS["num_experts"]), 2) for _ in range(2 * tokens)]
        routing = Routing(array("h", [expert for row in chosen for expert in row]).tobytes(), 4)
        return replace(member, kept=kept, routing=routing, logprobs=tuple(-1.5 for _ in member.logprobs))

    groups = [
        replace(group, trajectories=tuple(recorded(one, index) for index, one in enumerate(group.trajectories)))
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


@pytest.mark.real
@pytest.mark.usefixtures("megatron")
def test_kept_sets_and_experts_go_with_their_tokens(pair: Ranks, models: Models) -> None:
    """Fails when a rank takes the records of other tokens than it holds. Without them the loss is another one."""
    options, _ = models.of("qwen3_moe", False)
    batches = [with_records(BATCHES[0])]
    alone = run_learner(options, batches)
    runs = pair.run_as(CP, run_learner, with_sizes(options, CP), batches)
    assert runs[0].metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], abs=TOLERANCE)
    assert runs[0].metrics[0]["logprob_diff_max"] == pytest.approx(alone.metrics[0]["logprob_diff_max"], abs=TOLERANCE)
    assert largest(runs[0].gradients, alone.gradients) < TOLERANCE
    for forgetful in (lambda one: replace(one, kept=None), lambda one: replace(one, routing=None)):
        groups = [replace(group, trajectories=tuple(map(forgetful, group.trajectories))) for group in batches[0].groups]
        other = run_learner(options, [replace(batches[0], groups=tuple(groups))])
        assert abs(other.metrics[0]["loss"] - alone.metrics[0]["loss"]) > 100 * TOLERANCE


@pytest.mark.parametrize("size", [2, 3])
def test_every_token_has_one_rank_and_mirrored_chunks(size: int) -> None:
    lengths = [2 * size, 6 * size]
    held = [own_tokens(lengths, size, rank) for rank in range(size)]
    assert sorted(token for tokens in held for token in tokens) == list(range(sum(lengths)))
    assert held[0] == [0, 2 * size - 1, *(2 * size + at for at in (0, 1, 2, 6 * size - 3, 6 * size - 2, 6 * size - 1))]


@pytest.mark.parametrize("sizes", [CP, ParallelSizes(context=2, tensor=3, sequence=True)])
def test_packing_for_ranks_that_share_sequences(sizes: ParallelSizes) -> None:
    """Every trained token is read at the one row, of one rank, that holds the token before it."""
    sequences = [
        TokenSequence([40, 41, 42], [43, 44, 45], mask=[True, False, True]),
        TokenSequence([10], [11]),
        TokenSequence([20, 21], [22, 23, 24, 25]),
    ]
    found: dict[int, int] = {}
    for rank in range(2):
        (micro,) = pack(sequences, 20, Place(sizes, context=rank))
        assert micro.held is not None
        assert micro.input_ids.shape[1] == sum(count * length for count, length in micro.packed.runs) // 2
        assert micro.input_ids.shape[1] % (sizes.tensor if sizes.sequence else 1) == 0
        for token, row in zip(micro.held.tolist(), micro.rows.tolist(), strict=True):
            assert token not in found
            found[token] = int(micro.targets[token])
            assert micro.input_ids[0, row] == found[token] - 1
            assert micro.position_ids[0, row] == found[token] % 10 - 1
    assert sorted(found) == list(range(7))
