"""Tiny Hugging Face models on disk, and batches for them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from executors.trajectory import Batch, Group, Prompt, StopReason, Trajectory, VersionSpan
from miles.trainer.options import TrainerOptions

if TYPE_CHECKING:
    from miles.trainer.learner import Learner

VOCAB = 67
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": ROPE,
    "llama3": LLAMA3_ROPE,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def write_model(
    folder: Path,
    kind: str = "qwen3",
    *,
    tied: bool = True,
    rope: str = "default",
    seed: int = 0,
    experts: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a random model whose norms and biases are not trivial; returns `folder`.

    Kinds: qwen3, qwen2, llama, llama3 (llama with scaled positions), qwen3_moe (4 experts, 2 a token), gemma.
    `experts` changes the config of the experts.
    """
    torch.manual_seed(seed)
    if kind == "llama3":
        kind, rope = "llama", "llama3"
    # Copies: a transformers config keeps, and writes to, the dict it is given.
    shared = {**SIZES, "tie_word_embeddings": tied, "rope_parameters": dict(ROPES[rope])}
    model: Any
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shared, head_dim=16))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shared))
    elif kind == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **{**EXPERTS, **experts, "head_dim": 16}))
    elif kind == "gemma":
        # With a padding token, transformers leaves the embedding's gradient out where that token is an input.
        model = GemmaForCausalLM(GemmaConfig(**shared, head_dim=16, pad_token_id=None))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """The same model in transformers, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def checkpoint_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of a transformers model under the names of its checkpoint: in memory it fuses all experts of a layer."""
    result = {}
    for name, tensor in named:
        prefix, fused, part = name.rpartition(".experts.")
        if not fused:
            result[name] = tensor
            continue
        for expert, content in enumerate(tensor):
            parts = ["down"] if part == "down_proj" else ["gate", "up"]
            for which, rows in zip(parts, content.chunk(len(parts)), strict=True):
                result[f"{prefix}.experts.{expert}.{which}_proj.weight"] = rows
    return result


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """A transformers model's gradients under the names of its checkpoint."""
    return checkpoint_names((name, parameter.grad) for name, parameter in model.named_parameters())


def learner(folder: Path, **options: Any) -> Learner:
    """A learner on a model folder."""
    from miles.trainer.learner import Learner

    return Learner(TrainerOptions(model_path=folder, **options))


def hf_tensors(trained: Learner) -> dict[str, torch.Tensor]:
    """Copies of a learner's tensors under their Hugging Face names."""
    from miles.trainer.weights import global_tensors

    return dict(global_tensors(dict(trained.model.named_parameters()), trained.arch, trained.place))


def trajectory(
    prompt: Sequence[int], response: Sequence[int], reward: float | None, logprobs: Sequence[float] | None = None
) -> Trajectory:
    """A finished sample of version 1."""
    values = tuple(logprobs) if logprobs is not None else tuple(-4.0 for _ in response)
    spans = (VersionSpan(1, 0, len(response), "e0"),) if response else ()
    return Trajectory(tuple(prompt), tuple(response), values, spans, StopReason.STOP, reward)


def batch_of(step: int, *groups: Sequence[Trajectory]) -> Batch:
    """A batch for `step`."""
    made = tuple(
        Group(f"g{index:05d}", Prompt(index, members[0].prompt_ids, ""), tuple(members), step - 1)
        for index, members in enumerate(groups)
    )
    return Batch(made, step, (0,) * len(made))


def random_batch(step: int, *, seed: int = 0, groups: int = 3, group_size: int = 4) -> Batch:
    """Groups of random prompts, responses, rewards and behaviour logprobs near those of a random model."""
    dice = random.Random(f"{seed}-{step}")
    made = []
    for _ in range(groups):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 6))]
        members = []
        for _ in range(group_size):
            response = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 5))]
            members.append(
                trajectory(prompt, response, float(dice.random() < 0.5), [-4.2 + dice.random() * 0.3 for _ in response])
            )
        made.append(members)
    return batch_of(step, *made)
