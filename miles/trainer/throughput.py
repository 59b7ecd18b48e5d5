"""How fast a step was: seconds by phase, real tokens a second, and the share of the GPU's peak that the model used.

MFU counts the operations that the model's mathematics needs, recomputation not among them (PaLM, arXiv 2204.02311):
6 for each parameter that a token meets, and 12 for each pair of positions that attention compares, layer and channel,
halved since each position sees only those before it. The output head counts for tokens that are trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from miles.trainer.architecture import Architecture
from miles.trainer.sequences import TokenSequence

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 operations a second, from the vendor's data sheets, by a word of the device's name."""


class Stopwatch:
    """Seconds of named phases, each ended only when the device has done its work."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` returns once the device is idle."""
        self._wait = wait
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts as phase `name`; may be entered again."""
        started = time.perf_counter()
        yield
        self._wait()
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, phase: str) -> float:
        """What a phase has taken so far."""
        return self._phases.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """`<phase>_s` of each, and `train_s` since the start."""
        phases = {f"{name}_s": seconds for name, seconds in self._phases.items()}
        return phases | {"train_s": time.perf_counter() - self._started}


def peak_flops(device: str) -> float | None:
    """Of a device by its name; None where it is not known."""
    words = device.split()
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)


def model_flops(arch: Architecture, sequences: Sequence[TokenSequence]) -> float:
    """Operations of one forward and backward pass over the sequences."""
    attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.groups)
    if arch.experts is None:
        mlp = 3 * arch.hidden * arch.intermediate
    else:
        mlp = arch.hidden * (3 * arch.experts.chosen * arch.experts.intermediate + arch.experts.count)
    tokens = sum(sequence.length for sequence in sequences)
    trained = sum(sequence.trained for sequence in sequences)
    pairs = sum(sequence.length**2 for sequence in sequences) / 2
    products = arch.layers * (attention + mlp) * tokens + arch.vocab * arch.hidden * trained
    return 6.0 * products + 12.0 * arch.layers * arch.heads * arch.head_dim * pairs


def speed_metrics(
    arch: Architecture, sequences: Sequence[TokenSequence], seconds: float, ranks: int, device: str
) -> dict[str, float]:
    """`train_tokens_per_s` over all ranks, padding not counted, and `mfu` where the device's peak is known."""
    tokens = sum(sequence.length for sequence in sequences)
    metrics = {"tokens_packed": float(tokens), "train_tokens_per_s": tokens / seconds if seconds > 0 else 0.0}
    peak = peak_flops(device)
    if peak is not None and seconds > 0:
        metrics["mfu"] = model_flops(arch, sequences) / (seconds * ranks * peak)
    return metrics
