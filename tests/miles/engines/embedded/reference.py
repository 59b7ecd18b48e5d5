"""What Hugging Face transformers computes for the same model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Reference:
    """Logits and greedy continuations of a folder's model in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocabulary]."""
        result: Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return result

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely next tokens, one after the other."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
        """log_softmax(logits / temperature) of every response token."""
        rows = torch.log_softmax(self.logits([*prompt, *response]) / temperature, -1)
        return [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]
