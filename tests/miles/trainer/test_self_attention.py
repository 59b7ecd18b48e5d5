"""The fused self-attention, forced onto a CPU, computes what Megatron's own steps compute. On GPUs: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles.trainer import weights
from miles.trainer.architecture import read_architecture
from miles.trainer.attention import pack_params
from miles.trainer.model import build_model
from miles.trainer.self_attention import FusedSelfAttention
from tests.miles.trainer.tiny import VOCAB, write_model

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = [1, 7, 7, 20]
TOLERANCE = 1e-5


def logits_and_gradients(model: Any, positions: Tensor) -> list[Tensor]:
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    packed = pack_params(LENGTHS, torch.device("cpu"))
    packed.positions = positions
    logits = model(ids, positions[None], None, packed_seq_params=packed)
    named = dict(model.named_parameters())
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), list(named.values()))]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama3"])
def test_fused_and_upstream_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = write_model(tmp_path, kind)
    arch = read_architecture(folder)
    model = build_model(arch)
    weights.load_hf(dict(model.named_parameters()), folder, arch)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    expected = logits_and_gradients(model, positions)
    monkeypatch.setattr(FusedSelfAttention, "_fusable", lambda *_: True)
    for found, wanted in zip(logits_and_gradients(model, positions), expected, strict=True):
        assert float((found - wanted).abs().max()) < TOLERANCE
    # Control, and proof that the fused steps ran: only they read positions from the packed sequences.
    wrong = logits_and_gradients(model, torch.arange(sum(LENGTHS)).flip(0) % 20)
    assert float((wrong[0] - expected[0]).abs().max()) > 1e-2
