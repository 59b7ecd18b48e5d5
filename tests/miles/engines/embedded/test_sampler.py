"""The sampler: what it draws, and the log-probability it reports."""

from __future__ import annotations

import math

import pytest
import torch

from miles.engines.embedded.sampler import BatchSampling, Sampler, Sampling


def _draw(logits: torch.Tensor, sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    rows = logits.expand(count, -1)
    tokens, _, _ = Sampler(0).sample(rows, BatchSampling([sampling] * count))
    return torch.bincount(tokens, minlength=logits.shape[0]) / count


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_draws_in_proportion_to_the_scaled_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(_draw(logits, Sampling(temperature)), expected, atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_reports_the_logprob_under_the_scaled_distribution(temperature: float) -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    cut = [Sampling(temperature, top_p=0.5, top_k=3)] * 50
    tokens, logprobs, _ = Sampler(0).sample(logits, BatchSampling(cut))
    expected = torch.log_softmax(logits / temperature, -1)[torch.arange(50), tokens]
    torch.testing.assert_close(logprobs, expected)


def test_temperature_zero_is_greedy_beside_rows_that_sample() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.0]] * 40)
    rows = [Sampling(0.0) if i % 2 else Sampling(1.0) for i in range(40)]
    tokens, logprobs, _ = Sampler(0).sample(logits, BatchSampling(rows))
    assert tokens[1::2].tolist() == [1] * 20
    assert set(tokens[::2].tolist()) == {0, 1, 2}
    assert logprobs[1].item() == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]))


def test_top_k_keeps_k_tokens() -> None:
    shares = _draw(torch.tensor([1.0, 3.0, 2.0, 0.0]), Sampling(1.0, top_k=2))
    assert shares[0] == shares[3] == 0
    assert shares[1].item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    shares = _draw(logits, Sampling(1.0, top_p=0.7))
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0, 0]), atol=0.015, rtol=0)


def test_tells_what_top_k_and_top_p_kept_and_the_logprob_within() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    rows = [Sampling(1.0, top_p=0.7, masks=True), Sampling(1.0, top_k=3, masks=True), Sampling(1.0, top_k=2)]
    rows += [Sampling(0.0, top_k=3, masks=True)]
    tokens, logprobs, kept = Sampler(0).sample(probabilities.log().expand(4, -1), BatchSampling(rows))
    assert kept is not None and kept[2] is None and kept[3] == ([1], 0.0)
    for row, ids in ((0, [1, 3]), (1, [1, 3, 2])):
        record = kept[row]
        assert record is not None and record.ids == ids
        share = probabilities[tokens[row]] / probabilities[ids].sum()
        assert record.logprob == pytest.approx(math.log(share), abs=1e-6)
        assert logprobs[row].item() == pytest.approx(math.log(probabilities[tokens[row]]), abs=1e-6)


def test_no_row_that_asks_costs_nothing() -> None:
    assert Sampler(0).sample(torch.zeros(2, 3), BatchSampling([Sampling(1.0, top_k=2)] * 2)).kept is None


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = torch.zeros(200, 50)
    batch = BatchSampling([Sampling()] * 200)
    first, second, other = (Sampler(seed).sample(logits, batch)[0] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_refuses_logits_that_are_not_finite(temperature: float) -> None:
    """Fails without the check of `picked` in `Sampler.sample`: NaN would leave the engine as a null logprob."""
    logits = torch.tensor([[0.0, 1.0], [float("nan"), float("nan")]])
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler(0).sample(logits, BatchSampling([Sampling(temperature)] * 2))
