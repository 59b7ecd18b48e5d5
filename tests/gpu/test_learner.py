"""The learner on a GPU: exact in fp32, sound in bf16, the same with recomputation, and whole across a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example
from tests.miles.trainer.tiny import VOCAB, hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")

STEPS = 3
LR = 1e-3


def examples(seed: int = 0) -> list[Example]:
    dice = random.Random(seed)
    return [
        Example(*(tuple(dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))) for _ in range(2)))
        for _ in range(12)
    ]


def on_gpu(folder: Path, dtype: str, **options: Any) -> Any:
    return learner(folder, device="cuda", dtype=dtype, micro_batch_tokens=100, **options)


def train_reference(model: Any) -> list[float]:
    """Three steps of transformers' model in fp32 on the GPU with torch's AdamW; the losses."""
    options = TrainerOptions(Path("none"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=options.weight_decay, betas=options.betas, eps=options.eps
    )
    losses = []
    for step in range(STEPS):
        batch = examples(step)
        tokens = sum(len(one.completion_ids) for one in batch)
        total = 0.0
        for one in batch:
            ids = torch.tensor([one.prompt_ids + one.completion_ids], device="cuda")
            logits = model(ids[:, :-1]).logits[0, len(one.prompt_ids) - 1 :]
            loss = F.cross_entropy(logits, ids[0, len(one.prompt_ids) :], reduction="sum") / tokens
            torch.autograd.backward(loss)
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gemma", "qwen3_moe"])
def test_three_steps_in_fp32_equal_transformers(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path, kind)
    ours, theirs = on_gpu(folder, "float32"), reference(folder).cuda()
    losses = [ours.warmup_step(examples(step), LR).metrics["loss"] for step in range(STEPS)]
    assert losses == pytest.approx(train_reference(theirs), abs=1e-5)

    sequences = [(one.prompt_ids, one.completion_ids) for one in examples(9)]
    found = ours.logprobs(sequences)
    with torch.no_grad():
        for (prompt, response), values in zip(sequences, found, strict=True):
            logits = theirs(torch.tensor([prompt + response], device="cuda")).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response, device="cuda")[:, None])[:, 0]
            assert values == pytest.approx(expected.tolist(), abs=2e-5)


def test_bf16_trains_fp32_copies(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    half, full = on_gpu(folder, "bfloat16"), on_gpu(folder, "float32")
    batch = examples()
    # A rate so small that bf16 parameters, rounded after each step, would never move.
    for _ in range(20):
        small, exact = half.warmup_step(batch, 1e-5), full.warmup_step(batch, 1e-5)
    assert small.metrics["loss"] == pytest.approx(exact.metrics["loss"], abs=0.03)
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.model.parameters())
    moved = {name: tensor.float() for name, tensor in hf_tensors(half).items()}
    wanted = hf_tensors(full)
    before = dict(reference(folder).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    start = before[name].detach().to(wanted[name].device)
    step, seen = wanted[name] - start, moved[name] - start.bfloat16().float()
    assert float((step * seen).sum() / (step.norm() * seen.norm())) > 0.5
    first = half.warmup_step(batch, 1e-3).metrics["loss"]
    for _ in range(10):
        last = half.warmup_step(batch, 1e-3).metrics["loss"]
    assert last < first - 0.5


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    results = []
    for recompute in (False, True):
        one = on_gpu(folder, "float32", recompute=recompute)
        one.warmup_step(examples(), LR)
        results.append(hf_tensors(one))
        memory = one.model.config.recompute_granularity
        assert (memory == "full") is recompute
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, dtype: str) -> None:
    folder = write_model(tmp_path / "model")
    kept = on_gpu(folder, dtype)
    for step in (1, 2):
        kept.step(random_batch(step))
    kept.save(tmp_path / "checkpoint")
    resumed = on_gpu(folder, dtype)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.counters == kept.counters
    for name, tensor in hf_tensors(kept).items():
        assert torch.equal(hf_tensors(resumed)[name], tensor), name
    for step in (3, 4):
        mine, theirs = resumed.step(random_batch(step)).metrics, kept.step(random_batch(step)).metrics
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, tensor in hf_tensors(kept).items():
        torch.testing.assert_close(hf_tensors(resumed)[name], tensor, rtol=0, atol=tolerance)
