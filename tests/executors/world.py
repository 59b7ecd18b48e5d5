"""What most tests of the data plane need: engines, leases, a scorer and a journal around one executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor, RolloutOptions
from executors.sampling_client import SamplingParams
from executors.trajectory import Prompt, Trajectory
from tests.fakes.lease_source import FakeLeaseSource
from tests.fakes.sampling_client import FakeSamplingClient, FakeServer, expected_token, version_in

OPTIONS = RolloutOptions(
    group_size=2,
    groups_per_step=2,
    sampling=SamplingParams(max_new_tokens=8),
    max_context=64,
    max_staleness=1,
    partial="continue",
    max_retries=8,
    concurrency=64,
    request_timeout_s=30,
    lease_timeout_s=60,
)


class Prompts:
    """`count` prompts (None: without end), each of `length` tokens."""

    def __init__(self, count: int | None, length: int = 4) -> None:
        self.position = 0
        self._count = count
        self._length = length

    def next(self) -> Prompt | None:
        if self._count is not None and self.position >= self._count:
            return None
        self.position += 1
        return make_prompt(self.position - 1, self._length)


def make_prompt(index: int, length: int = 4) -> Prompt:
    return Prompt(index=index, ids=tuple(range(length)), label="")


class Scorer:
    """Scores 0 or 1 by turns; `answer` overrides it for a prompt (a value, an error to raise, or a delay)."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Callable[[Prompt], Any] | None = None

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        self.calls += 1
        if self.answer is None:
            return float(self.calls % 2)
        answer = self.answer(prompt)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Slow):
            await anyio.sleep(answer.seconds)
            return None
        reward: float | None = answer
        return reward


@dataclass(frozen=True, slots=True)
class Slow:
    """An answer that takes its time, and is an abstention then."""

    seconds: float


class World:
    """Engines engine-0, engine-1, ... that serve version 1, of step 0, which is published unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        *,
        engines: int = 2,
        token_s: float = 1.0,
        leases: FakeLeaseSource | None = None,
        published: bool = True,
        scorer: Scorer | None = None,
        **options: Any,
    ) -> None:
        self.client = FakeSamplingClient()
        self.leases = leases or FakeLeaseSource()
        self.scorer = scorer or Scorer()
        self.options = replace(OPTIONS, **options)
        self.journal = Journal(folder / "journal.sqlite")
        self.steps = {version: version - 1 for version in range(1, 1000)}
        self.token_s = token_s
        self.published = published
        self.executor = RolloutExecutor(
            self.leases, self.client, self.scorer, self.journal, self.options, self.steps.__getitem__
        )
        for number in range(engines):
            self.start(f"engine-{number}", f"engine-{number}.0", version=1)

    async def __aenter__(self) -> World:
        await self.executor.__aenter__()
        if self.published:
            self.executor.on_published(0)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self.executor.__aexit__(*exc)
        finally:
            self.journal.close()

    def start(self, engine: str, incarnation: str, *, version: int) -> FakeServer:
        """A new incarnation serves."""
        server = self.client.serve(f"http://{incarnation}", incarnation, version=version, token_s=self.token_s)
        self.leases.add(engine, incarnation, version=version)
        return server

    def server(self, engine: str) -> FakeServer:
        """The server of the engine's present incarnation."""
        return self.client.servers[self.leases.serving[engine].url]

    def kill(self, engine: str) -> None:
        """The engine's process dies, and the controller has seen it."""
        server = self.server(engine)
        self.leases.remove(engine)
        server.die()

    def update(self, version: int) -> None:
        """Every engine goes over to `version` in place, and it is published."""
        for engine in self.leases.serving:
            self.server(engine).version = version
            self.leases.update(engine, version)
        self.executor.on_published(version - 1)

    def assert_accounted(self) -> None:
        """Invariant 7."""
        assert self.executor.account.lost == 0


def assert_bit_for_bit(trajectory: Trajectory, length: int) -> None:
    """Tokens are those the engines sampled, in place; no span claims a version newer than the one that sampled it."""
    start = len(trajectory.prompt_ids)
    assert trajectory.response_ids == tuple(expected_token(start + i) for i in range(length))
    assert len(trajectory.logprobs) == length
    end = 0
    for span in trajectory.spans:
        assert span.start == end and span.end > span.start
        end = span.end
        for i in range(span.start, span.end):
            assert span.version <= version_in(trajectory.logprobs[i], start + i)
    assert end == length
