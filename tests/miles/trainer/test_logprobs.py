"""Logprobs from logits: padding columns, temperature, gradient, entropy."""

import pytest
import torch
from megatron.core import parallel_state

from miles.trainer.logprobs import entropies, scaled_logits, token_logprobs

pytestmark = pytest.mark.usefixtures("megatron")


def test_padding_columns_do_not_enter_the_softmax() -> None:
    """Fails without the mask in scaled_logits."""
    logits = torch.randn(5, 12)
    targets = torch.randint(0, 10, (5,))
    padded = token_logprobs(scaled_logits(logits, 10, 1.0), targets)
    wanted = logits[:, :10].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(padded, wanted, atol=1e-6)


def test_the_last_of_two_ranks_masks_its_own_padding() -> None:
    right = scaled_logits(torch.zeros(1, 6), 10, 1.0, rank=1)
    assert (right[0] == 0).tolist() == [True, True, True, True, False, False]


def test_gradient_is_that_of_log_softmax() -> None:
    """Fails without the private copy in token_logprobs: upstream overwrites its input."""
    logits = torch.randn(5, 12, requires_grad=True)
    targets = torch.randint(0, 12, (5,))
    scaled = scaled_logits(logits, 12, 0.7)
    kept = scaled.detach().clone()
    torch.autograd.backward((token_logprobs(scaled, targets) * torch.arange(5)).sum())
    assert torch.equal(scaled.detach(), kept)
    plain = logits.detach().clone().requires_grad_()
    torch.autograd.backward(
        ((plain / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0] * torch.arange(5)).sum()
    )
    assert logits.grad is not None and plain.grad is not None
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)


def test_entropy_ignores_padding() -> None:
    logits = torch.randn(4, 9)
    got = entropies(scaled_logits(logits, 7, 1.0), parallel_state.get_tensor_model_parallel_group())
    logprobs = logits[:, :7].log_softmax(-1)
    wanted = -(logprobs.exp() * logprobs).sum(-1)
    assert torch.allclose(got, wanted, atol=1e-5)
