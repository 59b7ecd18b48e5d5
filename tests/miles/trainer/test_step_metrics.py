"""Numbers of a step: exact over micro-batches, by staleness, speed."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from executors.trajectory import Batch, Trajectory, VersionSpan
from miles.trainer.architecture import Architecture, Experts
from miles.trainer.checkpoint import Counters
from miles.trainer.parallel import Place
from miles.trainer.sequences import TokenSequence
from miles.trainer.tally import Tally, _merged, _total
from miles.trainer.throughput import Stopwatch, model_flops, speed_metrics
from tests.miles.trainer.plain_loop import response_logprobs
from tests.miles.trainer.tiny import batch_of, learner, reference, trajectory, write_model


def two_ages() -> Batch:
    """For step 3: tokens of version 2 (made at step 1) and of version 3 (at step 2), which are 1 and 0 steps old."""

    def of(response: list[int], reward: float, cut: int) -> Trajectory:
        made = trajectory([1, 2], response, reward, [-3.0 - 0.1 * token for token in response])
        parts = ((2, 0, cut), (3, cut, len(response)))
        spans = tuple(VersionSpan(version, start, end, "e0") for version, start, end in parts if start < end)
        return dataclasses.replace(made, spans=spans)

    members = [of([3, 4, 5], 1.0, 2), of([6, 7], 0.0, 0), of([8], 0.0, 1), of([9, 10, 11, 12], 0.0, 1)]
    return dataclasses.replace(batch_of(3, members), staleness=(1,), version_steps={2: 1, 3: 2})


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("micro_batch_tokens", [4, 1000])
def test_engine_and_trainer_logprobs_differ_by_so_much_at_each_age(tmp_path: Path, micro_batch_tokens: int) -> None:
    folder = write_model(tmp_path / "model")
    trained = learner(folder, micro_batch_tokens=micro_batch_tokens)
    trained.counters = Counters(steps=2)
    metrics = trained.step(two_ages()).metrics
    plain = reference(folder)
    distances: dict[int, list[float]] = {0: [], 1: []}
    for member in two_ages().groups[0].trajectories:
        difference = (response_logprobs(plain, member).detach() - torch.tensor(member.logprobs)).abs().tolist()
        for span in member.spans:
            distances[3 - span.version].extend(difference[span.start : span.end])
    every = distances[0] + distances[1]
    assert metrics["logprob_diff_mean"] == pytest.approx(math.fsum(every) / len(every), abs=1e-5)
    assert metrics["logprob_diff_max"] == pytest.approx(max(every), abs=1e-5)
    for age, values in distances.items():
        assert metrics[f"logprob_diff_stale_{age}"] == pytest.approx(math.fsum(values) / len(values), abs=1e-5)
        assert metrics[f"logprob_diff_stale_{age}_max"] == pytest.approx(max(values), abs=1e-5)
    assert metrics["tokens"] == metrics["tokens_trained"] == len(every)


@pytest.mark.usefixtures("megatron")
def test_every_phase_has_its_seconds(tmp_path: Path) -> None:
    trained = learner(write_model(tmp_path / "model"))
    trained.counters = Counters(steps=2)
    metrics = trained.step(two_ages()).metrics
    phases = ("advantage_s", "forward_backward_s", "optimizer_s")
    assert all(metrics[name] > 0 for name in phases)
    assert sum(metrics[name] for name in phases) <= metrics["train_s"]
    assert metrics["train_tokens_per_s"] > 0 and "mfu" not in metrics


def test_sums_and_maxima_do_not_depend_on_the_cut() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    whole, cut = Tally(), Tally()
    for tally, pieces in ((whole, [values]), (cut, torch.split(values, [1, 30, 69]))):
        for piece in pieces:
            tally.add("sum", piece)
            tally.raise_to("top", piece)
    (one, top), (other, other_top) = whole.totals(Place()), cut.totals(Place())
    assert one["sum"] == pytest.approx(other["sum"], rel=1e-12)
    assert top == other_top == {"top": float(values.max())}


def test_a_maximum_that_is_no_number_stays_one() -> None:
    tally = Tally()
    tally.raise_to("top", torch.tensor([1.0, math.nan]))
    tally.raise_to("top", torch.tensor([2.0]))
    assert math.isnan(tally.totals(Place())[1]["top"])


@pytest.mark.parametrize("sums", [[math.inf, -math.inf], [1e308, 1e308], [math.nan, 1.0]])
def test_ranks_whose_sums_are_no_number_count_as_one_that_is_none(sums: list[float]) -> None:
    """Fails with a plain fsum, which raises: a step that explodes is to be skipped and counted."""
    total = _merged([{"loss": one} for one in sums], _total)["loss"]
    assert not math.isfinite(total)


def test_the_tally_of_a_rank_that_others_repeat_does_not_count() -> None:
    """Fails when tensor-parallel, context-parallel or earlier pipeline ranks add theirs: every token counts once."""
    tally = Tally()
    tally.add("sum", torch.ones(3))
    tally.raise_to("top", torch.ones(3))
    assert tally.totals(Place()) == ({"sum": 3.0}, {"top": 1.0})
    for place in (Place(tensor=1), Place(context=1), Place(pipeline=1)):
        assert tally.totals(place) == ({}, {})


DENSE = Architecture(
    model_type="llama",
    layers=3,
    hidden=8,
    heads=4,
    groups=2,
    head_dim=2,
    intermediate=16,
    vocab=100,
    max_positions=64,
    norm_eps=1e-6,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    rope_theta=1e4,
)
MIXED = dataclasses.replace(DENSE, experts=Experts(count=5, chosen=2, intermediate=4, normalised=True))


def test_flops_are_six_per_parameter_and_token_and_attention_by_position() -> None:
    """Written out by hand: projections, MLP, head for the trained tokens, scores and their products."""
    sequences = [TokenSequence([1] * 4, [2, 3, 4]), TokenSequence([1], [2])]  # 6 and 1 input tokens, 4 trained
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key and value, output
    assert model_flops(DENSE, sequences) == (
        6 * 3 * (attention + 3 * 8 * 16) * 7 + 6 * 100 * 8 * 4 + 3 * 12 * (4 * 2) * (6**2 + 1**2) / 2
    )
    experts = 2 * 3 * 8 * 4 + 8 * 5
    assert model_flops(MIXED, sequences) == (
        6 * 3 * (attention + experts) * 7 + 6 * 100 * 8 * 4 + 3 * 12 * (4 * 2) * (6**2 + 1**2) / 2
    )


def test_speed_counts_real_tokens_and_knows_the_peak_of_the_gpu() -> None:
    sequences = [TokenSequence([1] * 4, [2, 3, 4]), TokenSequence([1], [2])]
    metrics = speed_metrics(DENSE, sequences, 0.5, 2, "NVIDIA H200")
    assert metrics["train_tokens_per_s"] == 14
    assert metrics["mfu"] == pytest.approx(model_flops(DENSE, sequences) / (0.5 * 2 * 989e12))
    assert "mfu" not in speed_metrics(DENSE, sequences, 0.5, 2, "some other device")


def test_a_phase_lasts_until_the_device_is_done() -> None:
    waited: list[int] = []
    watch = Stopwatch(lambda: waited.append(len(waited)))
    with watch.phase("one"):
        assert not waited
    with watch.phase("one"):
        pass
    assert waited == [0, 1] and set(watch.metrics()) == {"one_s", "train_s"}
    assert watch.seconds("one") == watch.metrics()["one_s"] and watch.seconds("other") == 0
