"""Log-probabilities from hidden states against float64, in one chunk of rows and in many. On GPUs: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles.trainer import fused_logprobs
from miles.trainer.fused_logprobs import linear_logprobs

VOCAB, PADDED, WIDTH, ROWS = 11, 13, 16, 23
TEMPERATURE = 0.7
TOLERANCE = 1e-5


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (rows,), generator=generator)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, columns: int = VOCAB) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t()[:, :columns] / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_rows", [ROWS, 5, 1])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk_rows: int, entropy_weight: float) -> None:
    monkeypatch.setattr(fused_logprobs, "CHUNK_BYTES", chunk_rows * 4 * PADDED)
    hidden, weight, targets = inputs()
    upstream = torch.linspace(-1.0, 1.0, ROWS)
    results = []
    for logprobs, entropy in (
        linear_logprobs(hidden, weight, targets, vocab=VOCAB, temperature=TEMPERATURE),
        exact(hidden, weight, targets),
    ):
        total = (logprobs * upstream).sum() + entropy_weight * (entropy * upstream.flip(0)).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))))
    for found, expected in zip(*results, strict=True):
        assert float((found - expected).detach().abs().max()) < TOLERANCE
    # What the tolerance must see: columns that only pad the vocabulary in the softmax.
    assert float((exact(hidden, weight, targets, PADDED)[0] - results[1][0]).detach().abs().max()) > 1e-2


def test_a_micro_batch_without_trained_tokens_has_a_gradient_of_zero() -> None:
    hidden, weight, targets = inputs(0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, vocab=VOCAB)
    assert logprobs.shape == entropy.shape == (0,)
    of_hidden, of_weight = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert of_hidden.shape == hidden.shape
    assert torch.equal(of_weight, torch.zeros_like(weight))


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = linear_logprobs(1e4 * hidden, weight, targets, vocab=VOCAB)
    gradients = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(bool(value.isfinite().all()) for value in (logprobs, entropy, *gradients))
