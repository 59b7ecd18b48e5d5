"""AdamW behind Megatron's optimizer interface, free of its CUDA-only parts; gradient sums over ranks; the schedule.

A step whose gradient is not finite changes nothing: neither parameters nor Adam's moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from torch import Tensor

from miles.trainer.options import TrainerOptions


def learning_rate(options: TrainerOptions, step: int) -> float:
    """The rate of RL step `step`, counted from 1: linear climb, then a fall to a fraction of the peak, then flat.

    The fall is linear, half a cosine (Loshchilov & Hutter 2017, one cycle), or none at all (`constant`).
    A pure function of the step number, so that a resumed run cannot advance its schedule twice.
    """
    warmup, end = options.lr_warmup_steps, options.lr_decay_steps
    if step <= warmup:
        return options.lr * step / warmup
    if options.lr_schedule == "constant":
        return options.lr
    progress = min(1.0, (step - warmup) / (end - warmup)) if end > warmup else 1.0
    if options.lr_schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    return options.lr * (1.0 - progress * (1.0 - options.lr_final_fraction))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did. `grad_norm` is before clipping and may be inf or nan where it was skipped."""

    grad_norm: float
    skipped: bool


class PortableFP32Optimizer(FP32Optimizer):  # type: ignore[misc]
    """torch's AdamW with Megatron's sharded state; runs on any device and any backend."""

    def __init__(self, model: Any, options: TrainerOptions) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Megatron identifies parameter groups by these four keys when it restores a checkpoint.
        group = {
            "params": parameters,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        adamw = torch.optim.AdamW(
            [group],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        config = OptimizerConfig(optimizer="adam", lr=options.lr, clip_grad=options.clip_grad)
        # Not FP32Optimizer.__init__: it allocates on a GPU.
        MegatronOptimizer.__init__(self, adamw, config, lambda *_args: None)
        self._scale = torch.ones(1, device=parameters[0].device)
        self.is_stub_optimizer = False
        self.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        # Moments exist from the start, so that a checkpoint written before the first step has the same tensors.
        for parameter in parameters:
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def apply(self, lr: float, clip_grad: float) -> StepOutcome:
        """One step at rate `lr`, gradients clipped to `clip_grad` (0: not); they are cleared on the way out."""
        norm = self.global_grad_norm()
        skipped = not math.isfinite(norm)
        if not skipped:
            if clip_grad and norm > clip_grad:
                torch._foreach_mul_([p.grad for p in self.get_parameters()], clip_grad / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.zero_grad()
        return StepOutcome(norm, skipped)

    def global_grad_norm(self) -> float:
        """L2 norm over all ranks; shared parameters and replicas over TP count once."""
        gradients = self.get_main_grads_for_grad_norm()
        total = torch.zeros((), dtype=torch.float64)
        for gradient in gradients:
            total += gradient.double().square().sum()
        torch.distributed.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return float(total.sqrt())

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        """Megatron's, with the shared step also where it is 0 (upstream leaves it out, and loading then fails)."""
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading, metadata)
        state["state"].setdefault("common_step", self._extract_common_per_param_step(self.state_dict()))
        return state


@torch.no_grad()
def reduce_gradients(model: Any) -> None:
    """Sum gradients over data-parallel ranks, and those of replicated norms over TP ranks. Missing ones become 0."""
    data = parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if data.size() > 1:
            torch.distributed.all_reduce(parameter.grad, group=data)
        # Each TP rank sees the q/k norms through its own heads only: their gradients are partial sums.
        if tensor.size() > 1 and ("q_layernorm" in name or "k_layernorm" in name):
            torch.distributed.all_reduce(parameter.grad, group=tensor)


def total_over_data_parallel(sums: Tensor) -> Tensor:
    """Sum of a tensor over data-parallel ranks, in place."""
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return sums
