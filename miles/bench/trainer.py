"""Training tokens a second: Miles against a plain PyTorch loop over Hugging Face, `python -m miles.bench.trainer`.

All arms train the same random Qwen3 on the same sequences in one process, one step each in turn, round after round.
Counted are real tokens, never padding. The first rounds warm up; then the median of a round's seconds counts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from miles.bench.training_loops import Arm, Ids, MilesLoop, PackedLoop, PaddedLoop
from miles.trainer.architecture import read_architecture
from miles.trainer.sequences import TokenSequence
from miles.trainer.throughput import model_flops, peak_flops

SHAPES = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "groups": 2, "head_dim": 32, "intermediate": 256, "vocab": 512},
    "0.6b": {
        "layers": 28,
        "hidden": 1024,
        "heads": 16,
        "groups": 8,
        "head_dim": 128,
        "intermediate": 3072,
        "vocab": 151936,
    },
    "1.7b": {
        "layers": 28,
        "hidden": 2048,
        "heads": 16,
        "groups": 8,
        "head_dim": 128,
        "intermediate": 6144,
        "vocab": 151936,
    },
}
"""Of Qwen3 0.6B and 1.7B, and one for a CPU."""

ARMS: dict[str, Callable[..., Arm]] = {
    "hf_padded": PaddedLoop,
    "hf_packed": PackedLoop,
    "miles": MilesLoop,
    "miles_recompute": partial(MilesLoop, recompute=True),
}


@dataclass(slots=True)
class Timings:
    """Of one arm on one load. Memory is the most that the arm had at a time, other arms' not counted.

    The losses are those of all steps on the load, warm-up included: the arms' first ones on the first load are of the
    same weights. After that bf16 weights without fp32 copies learn less, because small updates are rounded away.
    """

    arm: str
    load: str
    tokens: int
    flops: float
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def mfu(self, peak_flops: float) -> float:
        return self.flops / statistics.median(self.seconds) / peak_flops


def write_model(shape: str, folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder of a random Qwen3 with tied embeddings, in bf16 (tiny: fp32)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="float32" if shape == "tiny" else "bfloat16",
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.float32 if shape == "tiny" else torch.bfloat16).save_pretrained(folder)
    return folder


def loads(tokens: int, length: int, vocab: int, *, seed: int = 0) -> dict[str, list[Ids]]:
    """About `tokens` input tokens each: `equal` in length, and `mixed`: lognormal (sigma 0.7), up to four times."""
    draw = random.Random(seed)
    equal = [length] * max(1, tokens // length)
    mixed: list[int] = []
    while sum(mixed) < tokens:
        mixed.append(max(16, min(4 * length, round(length * draw.lognormvariate(-0.25, 0.7)))))
    return {
        name: [[draw.randrange(vocab) for _ in range(count + 1)] for count in counts]
        for name, counts in (("equal", equal), ("mixed", mixed))
    }


def measure(arms: dict[str, Arm], sequences: Sequence[Ids], results: dict[str, Timings], rounds: int) -> None:
    """`rounds` rounds of one step of each arm in turn, into `results`."""
    gpu = torch.cuda.is_available()
    for _ in range(rounds):
        for name, arm in arms.items():
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if gpu else 0
            started = time.perf_counter()
            results[name].losses.append(arm.step(sequences))
            if gpu:
                torch.cuda.synchronize()
                results[name].peak_bytes = torch.cuda.max_memory_allocated() - before
            results[name].seconds.append(time.perf_counter() - started)


def run(given: argparse.Namespace) -> list[Timings]:
    """Build the arms, then time them on each load."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    found: list[Timings] = []
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        folder = write_model(given.shape, Path(scratch))
        arch = read_architecture(folder)
        arms: dict[str, Arm] = {}
        resident: dict[str, int] = {}
        for name in given.arms.split(","):
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            arms[name] = ARMS[name](folder, device=device, dtype=dtype, budget=given.budget)
            resident[name] = (torch.cuda.memory_allocated() if device == "cuda" else 0) - before
        for load, sequences in loads(given.tokens, given.length, arch.vocab).items():
            flops = model_flops(arch, [TokenSequence(ids[:1], ids[1:]) for ids in sequences])
            tokens = sum(len(ids) - 1 for ids in sequences)
            results = {name: Timings(name, load, tokens, flops) for name in arms}
            measure(arms, sequences, results, given.warmup)
            for timing in results.values():
                timing.seconds.clear()
            measure(arms, sequences, results, given.rounds)
            for name, timing in results.items():
                timing.peak_bytes += resident[name]
            found.extend(results.values())
            print(table(found, load), flush=True)
        if given.profile:
            _profile(arms, sequences)
    return found


def table(timings: Sequence[Timings], load: str) -> str:
    """Markdown rows of one load."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    rows = [f"| {load} | real tokens/s | of the fastest hf | MFU | ms a step | peak GB | loss |", "|" + "---|" * 7]
    ours = [timing for timing in timings if timing.load == load]
    rival = max((timing.tokens_per_s for timing in ours if timing.arm.startswith("hf")), default=float("nan"))
    for timing in ours:
        share = "" if peak is None else f"{timing.mfu(peak):.1%}"
        rows.append(
            f"| {timing.arm} | {timing.tokens_per_s:,.0f} | {timing.tokens_per_s / rival:.2f} | {share} "
            f"| {1e3 * statistics.median(timing.seconds):.1f} ({1e3 * min(timing.seconds):.1f} to "
            f"{1e3 * max(timing.seconds):.1f}) | {timing.peak_bytes / 1e9:.1f} "
            f"| {timing.losses[0]:.4f} to {timing.losses[-1]:.4f} |"
        )
    return "\n".join(rows)


def _profile(arms: dict[str, Arm], sequences: Sequence[Ids]) -> None:
    """Where the time of one step of each arm goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for name, arm in arms.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            arm.step(sequences)
        if isinstance(arm, MilesLoop):
            print({key: round(value, 4) for key, value in arm.metrics.items() if key.endswith("_s")})
        print(f"\n## {name}\n" + profiled.key_averages().table(sort_by="self_device_time_total", row_limit=30))


def main(argv: Sequence[str]) -> int:
    """Print a table a load; with --json, write every timing too."""
    parser = argparse.ArgumentParser(prog="python -m miles.bench.trainer", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--arms", default="hf_padded,hf_packed,miles", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--tokens", type=int, default=65536, help="input tokens of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of an equal sequence")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes, for each arm")
    parser.add_argument("--scratch", help="folder for the random model (default: the system's)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    unknown = sorted(set(given.arms.split(",")) - set(ARMS))
    if unknown:
        parser.error(f"unknown arms: {', '.join(unknown)}")
    device: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        device["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(device | {"shape": given.shape, "tokens": given.tokens, "budget": given.budget}), flush=True)
    found = run(given)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(timing) for timing in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
