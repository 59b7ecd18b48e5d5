"""What the trainer needs to know, as one frozen value. Torch-free: the driver makes it, every rank reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from controllers.errors import ConfigError
from miles.algorithms.options import DEFAULT_ALGORITHM, AlgorithmOptions
from miles.trainer.parallel import ONE_RANK, ParallelSizes

LR_SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Options of `MegatronTrainer` and its ranks. Raises ConfigError for values that cannot work."""

    model_path: Path
    """Hugging Face folder: config.json, safetensors, tokenizer files."""
    seed: int = 0
    dtype: str = "float32"
    """Of the parameters and the forward pass; `bfloat16`, on GPUs only, keeps float32 main weights and gradients."""
    lr: float = 3e-4
    """Peak learning rate of reinforcement learning; the warm-up stage brings its own."""
    lr_warmup_steps: int = 10
    """Steps over which the rate climbs linearly from lr / lr_warmup_steps to lr."""
    lr_schedule: str = "linear"
    """How the rate falls after its climb: a name of LR_SCHEDULES."""
    lr_decay_steps: int = 500
    """Step at which the decay ends: usually the total number of RL steps."""
    lr_final_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 means no clipping."""
    skip_grad_norm: float | None = None
    """A step whose gradient norm, before clipping, is above this changes nothing; None skips no finite one."""
    micro_batch_tokens: int = 8192
    """Token budget of one rank's packed micro-batch; a longer sequence gets a micro-batch of its own."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts, applied to the trainer's logits too."""
    threads: int = 1
    """Compute threads of a rank."""
    algorithm: AlgorithmOptions = DEFAULT_ALGORITHM
    """How rewards become a gradient."""
    parallel: ParallelSizes = ONE_RANK
    """How many ranks there are, and how they share the model and the batch."""
    device: str = "cpu"
    """`cpu` (gloo) or `cuda` (NCCL, one GPU a rank)."""
    recompute: bool = False
    """Compute each layer's activations again in the backward pass in place of keeping them."""
    start_timeout_s: float = 180.0
    """Deadline for a rank to load its model."""
    call_timeout_s: float = 600.0
    """Deadline of every later call: step, logprobs, on_each_rank, save, load, export."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.parallel.world_size

    def __post_init__(self) -> None:
        positive = ("lr", "eps", "temperature", "micro_batch_tokens", "lr_decay_steps", "threads")
        for key in (*positive, "start_timeout_s", "call_timeout_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"trainer {key} must be above 0, not {value!r}", key=key)
        for key in ("lr_warmup_steps", "weight_decay", "clip_grad", "lr_final_fraction"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"trainer {key} must be 0 or more, not {value!r}", key=key)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer betas must be 0 or more and below 1, not {self.betas!r}", key="betas")
        if self.skip_grad_norm is not None and not self.skip_grad_norm > 0:
            raise ConfigError(
                f"trainer skip_grad_norm must be above 0, not {self.skip_grad_norm!r}", key="skip_grad_norm"
            )
        if self.lr_schedule not in LR_SCHEDULES:
            known = ", ".join(LR_SCHEDULES)
            raise ConfigError(
                f"trainer lr_schedule must be one of {known}, not {self.lr_schedule!r}", key="lr_schedule"
            )
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"trainer device must be cpu or cuda, not {self.device!r}", key="device")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"trainer dtype must be float32 or bfloat16, not {self.dtype!r}", key="dtype")
        if self.dtype != "float32" and self.device == "cpu":
            raise ConfigError(f"trainer dtype {self.dtype!r} is not supported on CPU: use float32", key="dtype")
        if self.recompute and self.device == "cpu":
            raise ConfigError("trainer recompute needs a GPU", key="recompute")
