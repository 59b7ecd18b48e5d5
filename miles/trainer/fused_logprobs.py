"""Log-probabilities straight from hidden states, without ever holding all logits: the output head of a GPU trainer.

Logits of a vocabulary of 150,000 are the largest tensors of a step. They are made in fp32, a chunk of rows at a time,
reduced to three numbers a row, and made again in the backward pass. Only rows that are trained reach this function.
Over tensor-parallel ranks each reduces its own columns; the numbers are then put together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.trainer.compiled import fused

CHUNK_BYTES = 6 * 2**30
"""Of fp32 logits at a time. A micro-batch that fits into one chunk keeps its logits for the backward pass."""


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, temperature: float = 1.0, tp_group: Any = None
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy (nats) of softmax(hidden @ weight.T / temperature), both [n] fp32 and differentiable.

    `hidden` is [n, h], the same on all TP ranks; its gradient is summed over them. `weight` is this rank's rows
    [v / tp, h]: those beyond the true `vocab` never enter the softmax. `targets` [n] are global token ids.
    """
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, vocab, temperature, tp_group
    )
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float, tp_group: Any
    ) -> tuple[Tensor, Tensor]:
        rank = 0 if tp_group is None else tp_group.rank()
        width = weight.shape[0]
        local = targets - rank * width
        columns = min(width, vocab - rank * width)
        rows = max(1, CHUNK_BYTES // (4 * width))
        parts = []
        kept = None
        for start in range(0, max(1, hidden.shape[0]), rows):
            logits = _logits(hidden[start : start + rows], weight)
            parts.append(fused(row_sums, logits, local[start : start + rows], columns, temperature))
            kept = logits if hidden.shape[0] <= rows else None
        # Each [n]: log of the summed exponentials, the target's logit, the mean logit under the softmax.
        log_sum, chosen, mean = (torch.cat(values) for values in zip(*parts, strict=True))
        if tp_group is not None and tp_group.size() > 1:
            log_sum, chosen, mean = _over_ranks(log_sum, chosen, mean, tp_group)
        entropy = log_sum - mean
        ctx.save_for_backward(hidden, weight, local, log_sum, entropy)
        ctx.kept, ctx.columns, ctx.temperature, ctx.rows, ctx.tp_group = kept, columns, temperature, rows, tp_group
        return chosen - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, local, log_sum, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        of_hidden = torch.empty_like(hidden)
        of_weight: Tensor | None = None
        for start in range(0, max(1, hidden.shape[0]), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = _logits(hidden[part], weight) if ctx.kept is None else ctx.kept
            of_logits = fused(
                logit_gradient,
                logits,
                local[part],
                log_sum[part],
                entropy[part],
                of_logprob[part],
                of_entropy[part],
                ctx.columns,
                ctx.temperature,
                hidden.dtype,
            )
            ctx.kept = None
            del logits
            torch.mm(of_logits, weight, out=of_hidden[part])
            if ctx.rows >= hidden.shape[0]:
                of_weight = of_logits.t().mm(hidden)
            else:
                piece = _product(of_logits.t(), hidden[part])
                of_weight = piece if of_weight is None else of_weight.add_(piece)
        if ctx.tp_group is not None and ctx.tp_group.size() > 1:
            torch.distributed.all_reduce(of_hidden, group=ctx.tp_group)
        assert of_weight is not None
        return of_hidden, of_weight.to(weight.dtype), None, None, None, None


def row_sums(logits: Tensor, local: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of `logits` [n, v], over its first `columns` columns and at a temperature: log of the summed
    exponentials, logit of the target (0 where another rank has it), mean logit under the softmax."""
    scaled = logits[:, :columns] / temperature
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp()
    total = weights.sum(-1)
    mean = (weights * scaled).sum(-1) / total
    here = (local >= 0) & (local < columns)
    chosen = logits.gather(1, local.clamp(0, columns - 1).unsqueeze(1)).squeeze(1) / temperature
    return top.squeeze(1) + total.log(), torch.where(here, chosen, 0.0), mean


def logit_gradient(
    logits: Tensor,
    local: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    columns: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """d/d logits, [n, v]: of log p(target) it is (1[target] - p), of the entropy H it is -p (log p + H)."""
    index = torch.arange(logits.shape[1], device=logits.device)
    logprob = logits / temperature - log_sum.unsqueeze(1)
    gradient = (index == local.unsqueeze(1)) * of_logprob.unsqueeze(1) - logprob.exp() * (
        of_logprob.unsqueeze(1) + of_entropy.unsqueeze(1) * (logprob + entropy.unsqueeze(1))
    )
    return torch.where(index < columns, gradient / temperature, 0.0).to(dtype)


def _over_ranks(log_sum: Tensor, chosen: Tensor, mean: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The three numbers of all columns from those of each rank's."""
    every = [torch.empty_like(log_sum) for _ in range(group.size())]
    torch.distributed.all_gather(every, log_sum, group=group)
    whole = torch.stack(every).logsumexp(0)
    sums = torch.stack((chosen, mean * (log_sum - whole).exp()))
    torch.distributed.all_reduce(sums, group=group)
    return whole, sums[0], sums[1]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 [n, v]: bf16 would round logits of 16 to multiples of 1/8, which is seen in the log-probabilities."""
    return _product(hidden, weight.t())


def _product(first: Tensor, second: Tensor) -> Tensor:
    if first.is_cuda and first.dtype != torch.float32:
        return torch.mm(first, second, out_dtype=torch.float32)
    return first.mm(second).float()
