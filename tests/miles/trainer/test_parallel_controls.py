"""Each rule that makes parallel ranks exact, taken away once: the difference must be far outside the tolerance."""

import dataclasses

import pytest
import torch

from miles.trainer.parallel import ParallelSizes
from tests.miles.trainer import rank_calls
from tests.miles.trainer.parallel_checks import (
    BATCHES,
    DP,
    EP,
    PP,
    TOLERANCE,
    TP,
    TP_SP,
    Models,
    largest,
    logprob_error,
    with_sizes,
)
from tests.miles.trainer.plain_loop import plain_run, response_logprobs
from tests.miles.trainer.tiny import batch_of, reference, trajectory
from tests.support.ranks import Ranks

pytestmark = pytest.mark.real

FAR = 30 * TOLERANCE


@pytest.mark.parametrize("sizes", [TP, DP, PP], ids=["q-and-k-norms", "data-parallel", "tied-embedding"])
def test_gradients_that_are_not_finalized_are_partial(pair: Ranks, models: Models, sizes: ParallelSizes) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(sizes, rank_calls.run_without_finalize, with_sizes(options, sizes), BATCHES[:1])
    wrong = [
        name for name, wanted in plain.gradients.items() if float((runs[0].gradients[name] - wanted).abs().max()) > FAR
    ]
    if sizes == TP:
        assert wrong and all("q_norm" in name or "k_norm" in name for name in wrong)
    if sizes == PP:
        assert wrong == ["model.embed_tokens.weight"]
    assert wrong


def test_norms_without_their_mark_are_partial_under_sequence_parallelism(pair: Ranks, models: Models) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(TP_SP, rank_calls.run_without_sequence_marks, with_sizes(options, TP_SP), BATCHES[:1])
    assert largest(runs[0].gradients, plain.gradients) > FAR


def test_padding_columns_would_enter_the_softmax(pair: Ranks, models: Models) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(TP, rank_calls.run_without_pad_mask, with_sizes(options, TP), BATCHES[:1])
    assert logprob_error(runs[0], reference(options.model_path)) > FAR
    assert largest(runs[0].gradients, plain.gradients) > FAR


def test_means_of_micro_batches_are_not_the_mean_of_the_batch(pair: Ranks, models: Models) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(DP, rank_calls.run_with_means_of_means, with_sizes(options, DP), BATCHES[:1])
    assert largest(runs[0].gradients, plain.gradients) > FAR


def test_a_schedule_that_averages_changes_the_gradient_but_not_the_logged_loss(pair: Ranks, models: Models) -> None:
    """Upstream divides the loss in place: one logged without a copy would be divided too."""
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(PP, rank_calls.run_with_averaging_schedule, with_sizes(options, PP), BATCHES[:1])
    assert largest(runs[0].gradients, plain.gradients) > FAR
    assert runs[0].metrics[0]["loss"] == pytest.approx(plain.losses[0], abs=TOLERANCE)


@pytest.mark.parametrize("sizes", [TP, PP], ids=["replicas-over-tp", "tied-embedding"])
def test_parameters_on_two_ranks_would_count_twice(pair: Ranks, models: Models, sizes: ParallelSizes) -> None:
    options, plain = models.of("qwen3", True)
    runs = pair.run_as(sizes, rank_calls.run_counting_every_parameter, with_sizes(options, sizes), BATCHES[:1])
    assert runs[0].metrics[0]["grad_norm"] > 1.001 * plain.norms[0]


def test_experts_of_other_ranks_would_be_missing_from_the_norm(pair: Ranks, models: Models) -> None:
    options, plain = models.of("qwen3_moe", False)
    runs = pair.run_as(EP, rank_calls.run_without_expert_norm, with_sizes(options, EP), BATCHES[:1])
    assert runs[0].metrics[0]["grad_norm"] < 0.99 * plain.norms[0]


@pytest.mark.parametrize("tokens", [1, 17, 100_000])
@pytest.mark.parametrize("sizes", [DP, PP], ids=["dp", "pp"])
def test_cuts_of_the_batch_do_not_change_the_gradient(
    pair: Ranks, models: Models, sizes: ParallelSizes, tokens: int
) -> None:
    """O06: from a micro-batch a sequence to one for all, over ranks and stages."""
    options, plain = models.of("qwen3", True)
    cut = dataclasses.replace(options, parallel=sizes, micro_batch_tokens=tokens)
    runs = pair.run_as(sizes, rank_calls.run_learner, cut, BATCHES[:1])
    assert largest(runs[0].gradients, plain.gradients) < TOLERANCE


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", DP), ("qwen3_moe", EP)], ids=["dp", "ep"])
def test_a_rank_with_nothing_to_train_keeps_in_step(
    pair: Ranks, models: Models, kind: str, sizes: ParallelSizes
) -> None:
    """Three sequences in micro-batches of one on two ranks. Fails where the filler's token counts."""
    options, _ = models.of(kind, False)
    batch = batch_of(1, [trajectory([1, 2], [3, 4, 5], 1.0), trajectory([1, 2], [6], 0.0), trajectory([1], [7], 0.0)])
    wanted = plain_run(options, [batch], lambda step: 1e-3)
    cut = dataclasses.replace(options, parallel=sizes, micro_batch_tokens=1)
    runs = pair.run_as(sizes, rank_calls.run_learner, cut, [batch])
    assert sorted(len(run.logits) for run in runs) == [2, 2]
    assert largest(runs[0].gradients, wanted.gradients) < TOLERANCE
    assert runs[1].metrics[0]["loss"] == pytest.approx(wanted.losses[0], abs=TOLERANCE)
    members = batch.groups[0].trajectories
    model = reference(options.model_path)
    ratios = torch.cat([response_logprobs(model, one) - torch.tensor(one.logprobs) for one in members]).detach().exp()
    for run in runs:
        assert run.metrics[0]["ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-5)
