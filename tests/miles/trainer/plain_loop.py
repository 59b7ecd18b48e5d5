"""What parallel ranks are held against: GRPO in the plainest way, over transformers, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from executors.trajectory import Batch, Trajectory
from miles.trainer.options import TrainerOptions
from tests.miles.trainer.tiny import checkpoint_names, reference


@dataclass
class PlainRun:
    """A few steps. Tensors are under the names of the checkpoint."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


def response_logits(model: Any, member: Trajectory) -> Tensor:
    """[response tokens, vocab], each row the one that predicts its token."""
    ids = torch.tensor([*member.prompt_ids, *member.response_ids])
    logits: Tensor = model(ids[None]).logits[0][len(member.prompt_ids) - 1 : -1]
    return logits


def response_logprobs(model: Any, member: Trajectory) -> Tensor:
    """[response tokens]"""
    chosen = torch.tensor(member.response_ids)
    return response_logits(model, member).log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def grpo_loss(model: Any, batch: Batch) -> Tensor:
    """Clipped to [0.8, 1.28], mean over trained tokens, advantages (R - mean) / (std + 0.1)."""
    losses = []
    for group in batch.groups:
        rewards = [member.reward or 0.0 for member in group.trajectories]
        for member, reward in zip(group.trajectories, rewards, strict=True):
            advantage = (reward - fmean(rewards)) / (pstdev(rewards) + 0.1)
            ratio = (response_logprobs(model, member) - torch.tensor(member.logprobs)).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            losses.append(loss if member.mask is None else loss[torch.tensor(member.mask)])
    return torch.cat(losses).mean()


def plain_run(options: TrainerOptions, batches: Sequence[Batch], rate: Callable[[int], float]) -> PlainRun:
    """A step for each batch with torch's AdamW, as the options say, at the rate of its number."""
    model = reference(options.model_path)
    adamw = torch.optim.AdamW(
        model.parameters(), betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    run = PlainRun(before=_copies(model))
    for batch in batches:
        adamw.zero_grad()
        loss = grpo_loss(model, batch)
        torch.autograd.backward(loss)
        if not run.gradients:
            named = [(name, parameter.grad.clone()) for name, parameter in model.named_parameters()]
            run.gradients = checkpoint_names(named)
        run.losses.append(float(loss.detach()))
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)))
        adamw.param_groups[0]["lr"] = rate(batch.step)
        adamw.step()
    run.after = _copies(model)
    return run


def _copies(model: Any) -> dict[str, Tensor]:
    return checkpoint_names((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
