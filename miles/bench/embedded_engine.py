"""Tokens a second of the embedded engine over HTTP: `python -m miles.bench.embedded_engine`.

Starts one engine on a core of its own with the quickstart's model and streams from it with many requests at once; the
client keeps to the other cores. Prints the rate by the clock, and the engine's CPU time per token and per request,
which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import psutil

from miles.models.presets import write_preset

_PROMPT_TOKENS = 12
_GROUP = 16
"""Requests that share a prompt, as the samples of a GRPO group do."""


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of `tokens` new tokens each, `concurrency` of them at once."""

    requests: int
    tokens: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one load took. `cpu_s` is the engine's, user and system."""

    load: Load
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s

    def __str__(self) -> str:
        return (
            f"{self.load.requests} requests x {self.load.tokens} tokens, {self.load.concurrency} at once: "
            f"{self.tokens_per_s:,.0f} tokens/s; engine CPU {1e6 * self.cpu_s / self.tokens:.0f} us a token, "
            f"{1e3 * self.cpu_s / self.load.requests:.2f} ms a request"
        )


@contextmanager
def running_engine(folder: Path, core: int | None = 0) -> Iterator[tuple[str, int]]:
    """An engine process on one core (None: on any): its URL and process id. Ends with the block."""
    command = [sys.executable, "-m", "miles.engines.embedded", "--model-path", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        # At once: threads inherit the affinity of the one that starts them.
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {core})
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().rpartition(" ")[2]
            if not url:
                raise RuntimeError(f"the engine ended with code {process.wait()} before it served")
            yield url, process.pid
        finally:
            process.terminate()


async def measure(url: str, pid: int, load: Load) -> Measured:
    """Stream the whole load from an engine."""
    process = psutil.Process(pid)
    numbers = iter(range(load.requests))
    tokens = 0

    async def stream(session: aiohttp.ClientSession, number: int) -> int:
        start = 5 + number // _GROUP % 100
        sampling = {"max_new_tokens": load.tokens, "temperature": 1.0, "ignore_eos": True}
        request = {
            "input_ids": list(range(start, start + _PROMPT_TOKENS)),
            "rid": f"{number:08d}",
            "cache_salt": "bench:1",
            "stream": True,
            "return_logprob": True,
            "sampling_params": sampling,
        }
        count = 0
        async with session.post(f"{url}/generate", data=orjson.dumps(request)) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    count += len(orjson.loads(line[6:])["output_ids"])
        return count

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for number in numbers:
            count = await stream(session, number)
            tokens += count

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before, began = _cpu_s(process), time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(load.concurrency):
                workers.create_task(worker(session))
        return Measured(load, tokens, time.perf_counter() - began, _cpu_s(process) - before)


def main(argv: Sequence[str]) -> int:
    """Print one line a round."""
    parser = argparse.ArgumentParser(prog="python -m miles.bench.embedded_engine", description=__doc__)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="tiny-qwen3")
    given = parser.parse_args(argv)
    load = Load(given.requests, given.tokens, given.concurrency)
    with tempfile.TemporaryDirectory() as folder, running_engine(write_preset(given.preset, Path(folder))) as engine:
        if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
            os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})
        asyncio.run(measure(*engine, Load(load.concurrency, 20, load.concurrency)))  # warm-up
        for _ in range(given.rounds):
            print(asyncio.run(measure(*engine, load)), flush=True)
    return 0


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
