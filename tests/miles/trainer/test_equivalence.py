"""The Megatron model computes what transformers computes: logits, logprobs, gradients, optimizer steps.

Differences are near 1e-6 (fp32 sums in another order); TOLERANCE leaves a factor of ten. The controls show that each
kind of mistake is far outside it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executors.trajectory import Batch
from miles.algorithms.advantages.grpo import grpo
from miles.algorithms.advantages.sample import Sample
from miles.trainer.attention import pack_params
from miles.trainer.learner import Learner
from miles.trainer.optimizer import learning_rate
from miles.trainer.weights import copy_out
from tests.miles.trainer.tiny import VOCAB, hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")

TOLERANCE = 1e-5
MODELS = [(kind, tied) for kind in ("qwen3", "llama", "qwen2") for tied in (True, False)] + [("llama3", False)]
LENGTHS = [1, 7, 7, 20]


def sequences(seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def packed_logits(trained: Learner, rows: list[Tensor]) -> Tensor:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = pack_params(lengths, torch.device("cpu"))
    logits: Tensor = trained.model(torch.cat(rows)[None], positions, None, packed_seq_params=packed)[0]
    return logits[:, :VOCAB]


def reference_logits(model: Any, rows: list[Tensor]) -> Tensor:
    return torch.cat([model(row[None]).logits[0] for row in rows])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_logits_and_gradients_match_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = write_model(tmp_path / "model", kind, tied=tied)
    ours, theirs = learner(folder), reference(folder)
    rows = sequences()

    batch = torch.stack([rows[1], rows[2]])
    positions = torch.arange(batch.shape[1]).expand_as(batch)
    assert difference(ours.model(batch, positions, None)[..., :VOCAB], theirs(batch).logits) < TOLERANCE

    mine, other = packed_logits(ours, rows), reference_logits(theirs, rows)
    assert difference(mine, other) < TOLERANCE
    targets = torch.cat(rows).roll(-1)
    for logits in (mine, other):
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits, targets))
    gradients = copy_out([{name: p.grad for name, p in ours.model.named_parameters()}], ours.arch)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(gradients) == set(wanted)
    assert max(difference(gradients[name], wanted[name]) for name in wanted) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_have_the_temperature_of_the_rollouts(tmp_path: Path, temperature: float) -> None:
    """O07. Fails without the division in logprobs.scaled_logits."""
    folder = write_model(tmp_path / "model")
    ours, theirs = learner(folder, temperature=temperature, micro_batch_tokens=12), reference(folder)
    rows = sequences()[1:]
    answers = ours.logprobs([(row[:2].tolist(), row[2:].tolist()) for row in rows])
    for row, answer in zip(rows, answers, strict=True):
        logprobs = (theirs(row[None]).logits[0] / temperature).log_softmax(-1)
        wanted = logprobs[1:-1].gather(1, row[2:, None])[:, 0]
        assert difference(torch.tensor(answer), wanted) < TOLERANCE


def test_sequences_of_a_pack_do_not_see_one_another(tmp_path: Path) -> None:
    ours = learner(write_model(tmp_path / "model"))
    rows = sequences()
    before = packed_logits(ours, rows)
    rows[1] = (rows[1] + 1) % VOCAB
    after = packed_logits(ours, rows)
    changed = (before - after).abs().amax(-1) > 0
    assert changed[1:8].all()
    assert not changed[:1].any() and not changed[8:].any()


def _ungrouped_qkv(name: str, parameter: Tensor) -> None:
    if name.endswith("linear_qkv.weight"):
        first, second = parameter.clone().chunk(2)
        parts = [torch.split(half, [32, 16, 16]) for half in (first, second)]
        parameter.copy_(torch.cat([group[index] for index in range(3) for group in parts]))


def _swapped_gate_and_up(name: str, parameter: Tensor) -> None:
    if name.endswith("linear_fc1.weight"):
        gate, up = parameter.clone().chunk(2)
        parameter.copy_(torch.cat([up, gate]))


def _one_element(name: str, parameter: Tensor) -> None:
    if name == "decoder.layers.0.mlp.linear_fc2.weight":
        parameter[0, 0] += 1e-3


@pytest.mark.parametrize("mistake", [_ungrouped_qkv, _swapped_gate_and_up, _one_element])
def test_a_wrong_weight_mapping_would_be_seen(tmp_path: Path, mistake: Any) -> None:
    folder = write_model(tmp_path / "model")
    ours, theirs = learner(folder), reference(folder)
    with torch.no_grad():
        for name, parameter in ours.model.named_parameters():
            mistake(name, parameter)
    assert difference(packed_logits(ours, sequences()), reference_logits(theirs, sequences())) > 3 * TOLERANCE


def test_swapped_query_and_key_norms_would_be_seen(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    ours, theirs = learner(folder), reference(folder)
    with torch.no_grad():
        for layer in ours.model.decoder.layers:
            query, key = layer.self_attention.q_layernorm.weight, layer.self_attention.k_layernorm.weight
            kept = query.clone()
            query.copy_(key)
            key.copy_(kept)
    assert difference(packed_logits(ours, sequences()), reference_logits(theirs, sequences())) > 3 * TOLERANCE


def test_a_wrong_rope_theta_would_be_seen(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    theirs = reference(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert difference(packed_logits(learner(folder), sequences()), reference_logits(theirs, sequences())) > 0.01


def reference_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, clip_grad: float) -> float:
    """GRPO with a clipped token-mean loss in the plainest way: one sequence at a time. Returns the gradient norm."""
    losses = []
    for group in batch.groups:
        advantages = grpo([[Sample(member.reward or 0.0) for member in group.trajectories]])[0]
        for member, advantage in zip(group.trajectories, advantages, strict=True):
            ids = torch.tensor([*member.prompt_ids, *member.response_ids])
            start = len(member.prompt_ids)
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
            ratio = (logprobs - torch.tensor(member.logprobs)).exp()
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    optimizer.zero_grad()
    torch.autograd.backward(torch.cat(losses).mean())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False)])
def test_three_rl_steps_match_a_plain_pytorch_loop(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = write_model(tmp_path / "model", kind, tied=tied)
    ours = learner(folder, micro_batch_tokens=40, clip_grad=0.05, lr_warmup_steps=2, lr=1e-3)
    theirs = reference(folder)
    before = hf_tensors(ours)
    adamw = torch.optim.AdamW(theirs.parameters(), weight_decay=0.0)
    for step in (1, 2, 3):
        adamw.param_groups[0]["lr"] = learning_rate(ours.options, step)
        batch = random_batch(step)
        stats = ours.step(batch)
        norm = reference_step(theirs, adamw, batch, 0.05)
        assert norm > 0.05, "clipping must be at work"
        assert stats.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = hf_tensors(ours)
    wanted = dict(theirs.named_parameters())
    assert max(difference(after[name], wanted[name]) for name in wanted) < TOLERANCE
    assert max(difference(after[name], before[name]) for name in wanted) > 100 * TOLERANCE
