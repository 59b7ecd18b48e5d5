"""The arms of the trainer benchmark: one optimizer step on the same sequences, by Miles or by a plain PyTorch loop.

Every token but a sequence's first is trained, with the mean cross-entropy over all trained tokens as the loss, AdamW
and gradients clipped to norm 1. The plain loops are what one writes over a Hugging Face model: bf16 weights without
fp32 copies, fused AdamW, right-padded batches sorted by length, no attention mask (causal attention needs none).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.trainer.cpu_compat import import_megatron
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example

LR = 1e-5
BETAS = (0.9, 0.95)
CLIP = 1.0

Ids = Sequence[int]


class Arm(Protocol):
    """A way to train."""

    def step(self, sequences: Sequence[Ids]) -> float:
        """One optimizer step; its loss."""


class MilesLoop:
    """Miles' own learner, alone in its group."""

    def __init__(self, folder: Path, *, device: str, dtype: str, budget: int, recompute: bool = False) -> None:
        import_megatron()
        from miles.trainer.learner import Learner
        from miles.trainer.process_group import join_alone

        join_alone(threads=torch.get_num_threads(), device=device)
        options = TrainerOptions(
            folder,
            device=device,
            dtype=dtype,
            betas=BETAS,
            clip_grad=CLIP,
            micro_batch_tokens=budget,
            recompute=recompute,
            threads=torch.get_num_threads(),
        )
        self.learner = Learner(options)
        self.metrics: dict[str, float] = {}
        """Of the step done last."""

    def step(self, sequences: Sequence[Ids]) -> float:
        """A supervised step: each sequence's first token is its prompt."""
        examples = [Example(tuple(ids[:1]), tuple(ids[1:])) for ids in sequences]
        self.metrics = self.learner.warmup_step(examples, LR).metrics
        return self.metrics["loss"]


class PaddedLoop:
    """A plain loop over right-padded micro-batches with SDPA attention."""

    attention = "sdpa"

    def __init__(self, folder: Path, *, device: str, dtype: str, budget: int) -> None:
        from transformers import AutoModelForCausalLM

        self._budget = budget
        self._device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=self.attention
        )
        self._model = model.to(self._device)
        self._model.train()
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(self, sequences: Sequence[Ids]) -> float:
        """One step."""
        tokens = sum(len(ids) - 1 for ids in sequences)
        total = torch.zeros((), device=self._device)
        for batch in self._batches(sorted(sequences, key=len)):
            loss = self._loss(batch) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    def _batches(self, ordered: Sequence[Ids]) -> Iterator[list[Ids]]:
        """Neighbours in length under the token budget, their padding counted."""
        taken: list[Ids] = []
        for ids in ordered:
            if taken and (len(taken) + 1) * (len(ids) - 1) > self._budget:
                yield taken
                taken = []
            taken.append(ids)
        yield taken

    def _loss(self, batch: Sequence[Ids]) -> Tensor:
        """Sum of the cross-entropy over the batch's real tokens."""
        width = max(map(len, batch))
        ids = torch.zeros((len(batch), width), dtype=torch.int64)
        targets = torch.full((len(batch), width), -100)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = targets[row, : len(sequence)] = torch.tensor(sequence)
        logits = self._model(input_ids=ids[:, :-1].to(self._device)).logits
        return _cross_entropy(logits, targets[:, 1:].to(self._device))


class PackedLoop(PaddedLoop):
    """A plain loop over packed sequences with a variable-length flash kernel in the Hugging Face model. GPU only."""

    attention = "packed"

    def __init__(self, folder: Path, *, device: str, dtype: str, budget: int) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(self.attention, _packed_attention)
        AttentionMaskInterface.register(self.attention, lambda *_args, **_kwargs: None)
        super().__init__(folder, device=device, dtype=dtype, budget=budget)

    def _batches(self, ordered: Sequence[Ids]) -> Iterator[list[Ids]]:
        taken: list[Ids] = []
        tokens = 0
        for ids in ordered:
            if taken and tokens + len(ids) - 1 > self._budget:
                yield taken
                taken, tokens = [], 0
            taken.append(ids)
            tokens += len(ids) - 1
        yield taken

    def _loss(self, batch: Sequence[Ids]) -> Tensor:
        lengths = torch.tensor([len(ids) - 1 for ids in batch])
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(self._device)
        ids = torch.cat([torch.tensor(one[:-1]) for one in batch]).unsqueeze(0)
        positions = torch.cat([torch.arange(int(length)) for length in lengths]).unsqueeze(0)
        targets = torch.cat([torch.tensor(one[1:]) for one in batch])
        logits = self._model(
            input_ids=ids.to(self._device),
            position_ids=positions.to(self._device),
            sequence_ends=ends,
            longest=int(lengths.max()),
        ).logits
        return _cross_entropy(logits, targets.to(self._device))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """As Hugging Face's own loss: in fp32, a sum here; -100 counts for nothing."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")


def _packed_attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    scaling: float | None = None,
    sequence_ends: Tensor,
    longest: int,
    **_rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, t, d], [1, groups, t, d] twice -> [1, t, heads, d]."""
    packed = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        *packed, sequence_ends, sequence_ends, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out.unsqueeze(0), None
