"""The fused functions of the GPU trainer compute what plain functions in higher precision compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

T, GROUPS, PER_GROUP, HEAD_DIM = 77, 2, 3, 64


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float) -> list[Tensor]:
    logprobs = F.log_softmax(hidden.double() @ weight.double().t()[:, :vocab] / temperature, -1)
    return [logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1000, 13])
def test_logprobs_and_entropies_with_their_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_rows: int
) -> None:
    from miles.trainer import fused_logprobs

    rows, width, vocab, padded = 130, 96, 1001, 1008
    monkeypatch.setattr(fused_logprobs, "CHUNK_BYTES", chunk_rows * 4 * padded)
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(padded, width, generator=generator, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    upstream = torch.randn(2, rows, generator=generator, device="cuda")

    found = fused_logprobs.linear_logprobs(hidden, weight, targets, vocab=vocab, temperature=0.8)
    gradients = torch.autograd.grad((torch.stack(found) * upstream).sum(), (hidden, weight))
    expected = plain_logprobs(hidden, weight, targets, vocab, 0.8)
    wanted = torch.autograd.grad((torch.stack(expected) * upstream).sum(), (hidden, weight))

    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 2e-6
    for one, other in zip(gradients, wanted, strict=True):
        assert relative(one, other) < (2e-6 if dtype == torch.float32 else 5e-3)
    # A padding column in the softmax is what the tolerance must not hide.
    unmasked = plain_logprobs(hidden, weight, targets, padded, 0.8)
    assert relative(unmasked[0], expected[0]) > 1e-4


def test_attention_over_packed_sequences_is_each_sequences_own() -> None:
    from miles.trainer.attention import SdpaCoreAttention, pack_params

    lengths = [5, 31, 1, 40]
    query = torch.randn(T, GROUPS * PER_GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(T, GROUPS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    attention = SdpaCoreAttention.__new__(SdpaCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = attention._cp_group = None
    packed = pack_params(lengths, torch.device("cuda"))
    found = attention(query, key, value, None, packed_seq_params=packed)
    upstream = torch.randn_like(found)

    pieces = []
    for q, k, v in zip(*(torch.split(x.double(), lengths) for x in (query, key, value)), strict=True):
        of_query, of_key, of_value = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        out = F.scaled_dot_product_attention(of_query, of_key, of_value, is_causal=True, enable_gqa=True)
        pieces.append(out.transpose(0, 1).flatten(1))
    expected = torch.cat(pieces)

    inputs = (query, key, value)
    assert relative(found, expected) < 5e-3
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream.double()),
        strict=True,
    ):
        assert relative(one, other) < 1e-2
    # Positions after the first sequence would look back into it: far outside the tolerance.
    whole = pack_params([T], torch.device("cuda"))
    assert relative(attention(query, key, value, None, packed_seq_params=whole), expected) > 0.1


@pytest.mark.parametrize("normed", [True, False])
def test_cutting_norming_and_rotating_in_one_kernel(normed: bool) -> None:
    from miles.trainer.compiled import compiled
    from miles.trainer.self_attention import cut_norm_rotate

    mixed = torch.randn(T, GROUPS, PER_GROUP + 2, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, second = (torch.rand(HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    positions = torch.randint(0, 50, (T,), device="cuda")
    half = torch.arange(50, device="cuda")[:, None] * torch.logspace(0, -4, HEAD_DIM // 2, device="cuda")
    angles = torch.cat((half, half), -1)
    norms = (first, second) if normed else (None, None)
    exact = (first.double(), second.double()) if normed else (None, None)
    found = compiled(cut_norm_rotate)(mixed, angles.cos(), angles.sin(), positions, norms[0], norms[1], 1e-6)
    expected = cut_norm_rotate(
        mixed.double(), angles.cos().double(), angles.sin().double(), positions, exact[0], exact[1], 1e-6
    )

    inputs = (mixed, first, second) if normed else (mixed,)
    upstream = [torch.randn_like(one) for one in found]
    mine = torch.autograd.grad(found, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, [one.double() for one in upstream])
    for one, other in zip((*found, *mine), (*expected, *theirs), strict=True):
        assert relative(one, other) < 6e-3
