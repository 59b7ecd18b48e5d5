"""Logprobs and entropy from hidden states: padding columns, temperature, gradient."""

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from miles.trainer.fused_logprobs import linear_logprobs

pytestmark = pytest.mark.usefixtures("megatron")


def drawn(rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [5, 8], weight [rows, 8], targets [5] below 10."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 8, generator=generator)
    weight = torch.randn(rows, 8, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 10, (5,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight[:vocab].t() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_entropies_and_gradients_are_those_of_log_softmax(temperature: float) -> None:
    """Vocabulary 10 in 12 rows: fails when padding columns enter the softmax, and without the temperature."""
    hidden, weight, targets = drawn()
    group = parallel_state.get_tensor_model_parallel_group()
    ours = linear_logprobs(hidden, weight, targets, vocab=10, temperature=temperature, tp_group=group)
    theirs = plain(hidden, weight, targets, 10, temperature)
    scale = torch.arange(5.0)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
    own = torch.autograd.grad((ours[0] * scale + ours[1] * (scale - 2)).sum(), [hidden, weight])
    other = torch.autograd.grad((theirs[0] * scale + theirs[1] * (scale - 2)).sum(), [hidden, weight])
    for a, b in zip(own, other, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_padding_columns_would_be_seen() -> None:
    """Control: the same numbers over all 12 columns are others."""
    hidden, weight, targets = drawn()
    ours, _ = linear_logprobs(hidden, weight, targets, vocab=10)
    wrong, _ = plain(hidden, weight, targets, 12, 1.0)
    assert float((ours - wrong).detach().abs().max()) > 1e-3
