"""The optimizer on GPUs: Megatron's distributed optimizer over torch's fused AdamW.

Model parameters have the dtype of the model (bf16, say). Their fp32 copies and Adam's moments are cut over data-
parallel ranks; each updates its part, and the parts are gathered into the model's parameters, in place.
`optimizer.make_optimizer` builds it around a model with gradient buffers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from miles.trainer.optimizer import StepOutcome, begin_moments, gradient_factor
from miles.trainer.options import TrainerOptions


class DistributedAdamW:
    """Implements `optimizer.Optimizer`. `wrapped` was made by `with_gradient_buffers(sharded_optimizer=True)`."""

    def __init__(self, wrapped: Any, options: TrainerOptions) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=options.dtype == "bfloat16",
            params_dtype=getattr(torch, options.dtype),
            use_distributed_optimizer=True,
        )
        self._wrapped = wrapped
        # No overrides: weight decay is the same for all parameters, as on CPU.
        self._megatron = get_megatron_optimizer(config, [wrapped], config_overrides={})
        self._parts = [part for part in self._megatron.chained_optimizers if not part.is_stub_optimizer]
        for part in self._parts:
            begin_moments(part.optimizer, part.get_parameters())
        self._set_in_groups({"fused": True})

    @torch.no_grad()
    def apply(self, lr: float, clip_grad: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """See Optimizer. Waits for the device once, for the norm that decides."""
        self._megatron.prepare_grads()
        norm = self.global_grad_norm()
        factor = gradient_factor(norm, clip_grad, largest_norm)
        if factor is not None:
            if factor != 1.0:
                self._wrapped.scale_gradients(factor)
            self._set_in_groups({"lr": lr})
            self._megatron.step_with_ready_grads()
        self._megatron.zero_grad()
        return StepOutcome(norm, skipped=factor is None)

    def global_grad_norm(self) -> float:
        """L2 norm over all ranks, each of which has its part; shared parameters and replicas over TP count once."""
        gradients = [gradient for part in self._parts for gradient in part.get_main_grads_for_grad_norm()]
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        if gradients:
            total += torch.nn.utils.get_total_norm(gradients, foreach=True).double().square()
        group = parallel_state.get_intra_distributed_optimizer_instance_group()
        torch.distributed.all_reduce(total, group=group)
        return math.sqrt(float(total))

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool) -> Any:
        """fp32 parameters and moments as global tensors, and the step; a collective over data-parallel ranks.

        Without the parameter groups: what they hold follows from the options.
        """
        parts = [
            part.sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, {})
            for part in self._parts
        ]
        return {"state": dict(enumerate(parts)), "step": float(self._steps()[0])}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `sharded_state_dict` describes."""
        for index, part in enumerate(self._parts):
            moments = part.optimizer.state.values()
            # Upstream, which copies into all of Adam's state, has no step to copy where the optimizer is torch's.
            steps = [of_parameter.pop("step") for of_parameter in moments]
            part.load_parameter_state_from_fully_reshardable(state_dict["state"][index])
            for of_parameter, step in zip(moments, steps, strict=True):
                of_parameter["step"] = step
        for step in self._steps():
            step.fill_(state_dict["step"])

    def _steps(self) -> list[Tensor]:
        return [state["step"] for part in self._parts for state in part.optimizer.state.values()]

    def _set_in_groups(self, values: dict[str, Any]) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group.update(values)
