"""The Megatron model of one rank computes what transformers computes: logits, logprobs, gradients, for each model.

Differences are near 1e-6 (fp32 sums in another order); TOLERANCE leaves a factor of ten. The controls show that each
kind of mistake is far outside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles.trainer import weights
from miles.trainer.architecture import read_architecture
from miles.trainer.attention import pack_params
from miles.trainer.layout import layout
from miles.trainer.model import build_model
from tests.miles.trainer.tiny import VOCAB, gradients, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")

TOLERANCE = 1e-5
KINDS = ("qwen3", "qwen2", "llama", "qwen3_moe", "gemma")
MODELS = [(kind, tied, "default") for kind in KINDS for tied in (True, False)]
MODELS += [("llama", False, "llama3"), ("llama", True, "linear"), ("qwen3_moe", False, "llama3")]
LENGTHS = [1, 7, 7, 20]


def sequences(seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def load(folder: Path, **changes: Any) -> Any:
    """Our model of a folder, its architecture changed where a control says so."""
    arch = dataclasses.replace(read_architecture(folder), **changes)
    model = build_model(arch)
    weights.load_hf(dict(model.named_parameters()), folder, arch)
    return model


def packed_logits(model: Any, rows: list[Tensor]) -> Tensor:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = pack_params(lengths, torch.device("cpu"))
    logits: Tensor = model(torch.cat(rows)[None], positions, None, packed_seq_params=packed)[0]
    return logits[:, :VOCAB]


def reference_logits(model: Any, rows: list[Tensor]) -> Tensor:
    return torch.cat([model(row[None]).logits[0] for row in rows])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def error(model: Any, folder: Path) -> float:
    return difference(packed_logits(model, sequences()), reference_logits(reference(folder), sequences()))


@pytest.mark.parametrize(("kind", "tied", "rope"), MODELS)
def test_logits_logprobs_and_gradients_are_those_of_transformers(
    tmp_path: Path, kind: str, tied: bool, rope: str
) -> None:
    folder = write_model(tmp_path, kind, tied=tied, rope=rope)
    ours, theirs, rows = load(folder), reference(folder), sequences()

    batch = torch.stack([rows[1], rows[2]])
    positions = torch.arange(batch.shape[1]).expand_as(batch)
    assert difference(ours(batch, positions, None)[..., :VOCAB], theirs(batch).logits) < TOLERANCE

    mine, other = packed_logits(ours, rows), reference_logits(theirs, rows)
    assert difference(mine, other) < TOLERANCE
    targets = torch.cat(rows).roll(-1)[:, None]
    logprobs = [logits.log_softmax(-1).gather(1, targets) for logits in (mine, other)]
    assert difference(*logprobs) < TOLERANCE
    for values in logprobs:
        torch.autograd.backward(values.mean())
    arch = read_architecture(folder)
    # An expert that no token went to has no gradient.
    local = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    found, wanted = dict(weights.global_tensors(local, arch)), gradients(theirs)
    assert set(found) == set(wanted)
    assert max(difference(found[name], wanted[name]) for name in wanted) < TOLERANCE
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1000 * TOLERANCE


def test_sequences_of_a_pack_do_not_see_one_another(tmp_path: Path) -> None:
    model, rows = load(write_model(tmp_path)), sequences()
    before = packed_logits(model, rows)
    rows[1] = (rows[1] + 1) % VOCAB
    changed = (before - packed_logits(model, rows)).abs().amax(-1) > 0
    assert changed[1:8].all()
    assert not changed[:1].any() and not changed[8:].any()


def _swapped_gate_and_up(name: str, parameter: Tensor) -> None:
    if name.endswith("linear_fc1.weight"):
        gate, up = parameter.clone().chunk(2)
        parameter.copy_(torch.cat([up, gate]))


def _ungrouped_qkv(name: str, parameter: Tensor) -> None:
    if name.endswith("linear_qkv.weight"):
        first, second = parameter.clone().chunk(2)
        parts = [torch.split(half, [32, 16, 16]) for half in (first, second)]
        parameter.copy_(torch.cat([group[index] for index in range(3) for group in parts]))


def _one_element(name: str, parameter: Tensor) -> None:
    if name == "decoder.layers.0.mlp.linear_fc2.weight":
        parameter[0, 0] += 1e-4


def _rolled_experts(name: str, parameter: Tensor) -> None:
    if name.endswith("router.weight"):
        parameter.copy_(parameter.roll(1, 0))


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("qwen3", _ungrouped_qkv),
        ("qwen3", _swapped_gate_and_up),
        ("qwen3_moe", _swapped_gate_and_up),
        ("qwen3_moe", _rolled_experts),
        ("qwen3", _one_element),
    ],
)
def test_a_wrong_weight_mapping_would_be_seen(
    tmp_path: Path, kind: str, mistake: Callable[[str, Tensor], None]
) -> None:
    folder = write_model(tmp_path, kind)
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mistake(name, parameter)
    assert error(model, folder) > (TOLERANCE if mistake is _one_element else 1000 * TOLERANCE)


def test_swapped_query_and_key_norms_would_be_seen(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = load(folder)
    with torch.no_grad():
        for layer in model.decoder.layers:
            query, key = layer.self_attention.q_layernorm.weight, layer.self_attention.k_layernorm.weight
            kept = query.clone()
            query.copy_(key)
            key.copy_(kept)
    assert error(model, folder) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("kind", "rope", "changes"),
    [
        ("qwen3", "default", {"rope_theta": 2e4}),
        ("qwen3", "default", {"norm_eps": 1e-2}),
        ("llama", "llama3", {"inv_freq": None}),
        ("llama", "linear", {"inv_freq": None}),
        ("gemma", "default", {"gemma": False}),
    ],
)
def test_a_wrong_architecture_would_be_seen(tmp_path: Path, kind: str, rope: str, changes: dict[str, Any]) -> None:
    folder = write_model(tmp_path, kind, rope=rope)
    assert error(load(folder, **changes), folder) > 100 * TOLERANCE


def test_expert_weights_that_are_not_normalised_are_computed_so(tmp_path: Path) -> None:
    """`norm_topk_prob`: false. Fails when the softmax is always over the chosen experts alone."""
    folder = write_model(tmp_path, "qwen3_moe", experts={"norm_topk_prob": False})
    assert error(load(folder), folder) < TOLERANCE
    experts = read_architecture(folder).experts
    assert experts is not None and not experts.normalised
    assert error(load(folder, experts=dataclasses.replace(experts, normalised=True)), folder) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_weights_that_tensor_parallelism_cuts_say_so(tmp_path: Path, kind: str) -> None:
    """Else the gradient norm counts the first rank's part only. Fails without model._mark_tensor_parallel."""
    folder = write_model(tmp_path, kind, tied=False)
    whole = ("norm", "router")
    cut = {name for name in layout(read_architecture(folder)) if not any(word in name for word in whole)}
    marked = {name for name, p in load(folder).named_parameters() if getattr(p, "tensor_model_parallel", False)}
    assert marked == cut
