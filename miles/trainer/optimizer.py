"""The optimizer seam and its CPU side: AdamW behind Megatron's interface, free of its CUDA-only parts.

A step whose loss or gradient is not finite, or whose gradient is larger than allowed, changes nothing: neither
parameters nor Adam's moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from miles.trainer.options import TrainerOptions


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did. `grad_norm` is before clipping and may be inf or nan where it was skipped."""

    grad_norm: float
    skipped: bool


class Optimizer(Protocol):
    """What the learner needs of an optimizer; checkpoints need its sharded state too."""

    def apply(self, lr: float, clip_grad: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """One step on the finalized gradients at rate `lr`, with gradients clipped to the norm `clip_grad` (0: not).

        Changes nothing where the gradient norm is not finite or above `largest_norm`; all ranks decide alike.
        """

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool) -> Any:
        """Its state cut as the model's is."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `sharded_state_dict` describes."""


def make_optimizer(wrapped: Any, options: TrainerOptions) -> Optimizer:
    """The optimizer of a model wrapped by `gradients.with_gradient_buffers`."""
    if options.device == "cuda":
        from miles.trainer.distributed_optimizer import DistributedAdamW

        return DistributedAdamW(wrapped, options)
    return PortableFP32Optimizer(wrapped.module, options)


def gradient_factor(norm: float, clip_grad: float, largest_norm: float) -> float | None:
    """What to multiply a gradient of this norm by before the step (see `Optimizer.apply`); None: make no step."""
    if not math.isfinite(norm) or norm > largest_norm:
        return None
    return clip_grad / (norm + 1e-6) if clip_grad and norm > clip_grad else 1.0


def begin_moments(adamw: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Give Adam its moments from the start, so that a checkpoint written before the first step has the same tensors."""
    for parameter in parameters:
        adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter.data),
            "exp_avg_sq": torch.zeros_like(parameter.data),
        }


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
        self._experts = model.config.num_moe_experts is not None
        begin_moments(adamw, parameters)

    @torch.no_grad()
    def apply(self, lr: float, clip_grad: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """See Optimizer."""
        self.prepare_grads()
        norm = self.global_grad_norm()
        factor = gradient_factor(norm, clip_grad, largest_norm)
        if factor is not None:
            if factor != 1.0:
                torch._foreach_mul_([p.grad for p in self.get_parameters()], factor)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        # The gradients are the wrapped model's buffers: left in place, the next backward pass would add to them twice.
        self.zero_grad()
        return StepOutcome(norm, skipped=factor is None)

    def global_grad_norm(self) -> float:
        """L2 norm over all ranks; shared parameters and replicas over TP count once."""
        dense = torch.zeros((), dtype=torch.float64)
        experts = torch.zeros((), dtype=torch.float64)
        for parameter in self.get_parameters():
            if _counts_in_norm(parameter, self.tp_group):
                square = parameter.grad.double().square().sum()
                if getattr(parameter, "allreduce", True):
                    dense += square
                else:
                    experts += square
        torch.distributed.all_reduce(dense, group=self.get_grad_stats_parallel_group())
        if self._experts:
            group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            torch.distributed.all_reduce(experts, group=group)
        return float((dense + experts).sqrt())

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool) -> Any:
        """Megatron's, with the shared step also where it is 0 (upstream leaves it out, and loading then fails).

        Without the parameter groups: what they hold follows from the options, and their number from the parallel sizes.
        """
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading)
        state["state"].setdefault("common_step", self._extract_common_per_param_step(self.state_dict()))
        del state["param_groups"]
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `sharded_state_dict` describes; the parameter groups stay as they are."""
        super().load_state_dict({**state_dict, "param_groups": self.state_dict()["param_groups"]})


def _counts_in_norm(parameter: Tensor, tp_group: Any) -> bool:
    """Whether this rank's copy of a parameter is the one that counts, of a tied pair and among TP replicas."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, tp_group))
