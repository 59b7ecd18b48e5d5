"""The learner computes what a plain PyTorch loop over transformers computes: logprobs and optimizer steps.

That the model under it does, for every architecture, is in test_models.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from executors.trajectory import Batch
from miles.trainer.schedule import learning_rate
from tests.miles.trainer.test_models import TOLERANCE, difference, sequences
from tests.miles.trainer.tiny import checkpoint_names, hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")


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


def reference_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, clip_grad: float) -> float:
    """GRPO with a clipped token-mean loss in the plainest way: one sequence at a time. Returns the gradient norm."""
    losses = []
    for group in batch.groups:
        rewards = torch.tensor([member.reward or 0.0 for member in group.trajectories])
        # arXiv 2402.03300, with 0.1 beside the standard deviation of the group.
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 0.1)
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


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3", True), ("qwen2", False), ("llama3", False), ("qwen3_moe", False), ("gemma", True)]
)
def test_three_rl_steps_match_a_plain_pytorch_loop(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = write_model(tmp_path / "model", kind, tied=tied)
    ours = learner(folder, micro_batch_tokens=40, clip_grad=0.05, lr_warmup_steps=2, lr=1e-3)
    theirs = reference(folder)
    before = hf_tensors(ours)
    adamw = torch.optim.AdamW(
        theirs.parameters(), betas=ours.options.betas, eps=ours.options.eps, weight_decay=ours.options.weight_decay
    )
    for step in (1, 2, 3):
        adamw.param_groups[0]["lr"] = learning_rate(ours.options, step)
        batch = random_batch(step)
        stats = ours.step(batch)
        norm = reference_step(theirs, adamw, batch, 0.05)
        assert norm > 0.05, "clipping must be at work"
        assert stats.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = hf_tensors(ours)
    wanted = checkpoint_names(theirs.named_parameters())
    assert max(difference(after[name], wanted[name]) for name in wanted) < TOLERANCE
    assert max(difference(after[name], before[name]) for name in wanted) > 100 * TOLERANCE
