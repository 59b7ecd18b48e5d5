"""The response of one trajectory as it is received, over however many requests and engines it takes.

Invariant: token_ids, logprobs and spans stay aligned; what an engine sampled is kept bit for bit, and a token's
version is that of the engine which sampled it. Called by executors.generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from executors.sampling_client import LabelSpan, TokenChunk
from executors.sampling_record import KeptTokensBuilder, RoutingBuilder, RoutingReport
from executors.trajectory import StopReason, Trajectory, VersionSpan


class GenerationStream:
    """Tokens received so far. `budget` bounds them; a continued trajectory asks for what is left of it."""

    __slots__ = (
        "_attempt_start",
        "_granted_version",
        "_kept",
        "_report",
        "_routing",
        "_stop_token_ids",
        "budget",
        "deadline",
        "logprobs",
        "prompt_ids",
        "spans",
        "token_ids",
    )

    def __init__(self, prompt_ids: tuple[int, ...], budget: int, stop_token_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self.budget = budget
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.deadline = math.inf
        """Event loop time by which it must be finished; set with its first lease."""
        self._attempt_start = 0
        self._granted_version = 0
        self._stop_token_ids = frozenset(stop_token_ids)
        self._kept = KeptTokensBuilder()
        self._routing = RoutingBuilder(len(prompt_ids))
        self._report: RoutingReport | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be asked for."""
        return self.budget - len(self.token_ids)

    @property
    def attempt_tokens(self) -> int:
        """Tokens received by the present request."""
        return len(self.token_ids) - self._attempt_start

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that may have sampled a token received so far; None before the first token."""
        versions = [span.version for span in self.spans]
        if self.attempt_tokens:
            versions.append(self._granted_version)
        return min(versions, default=None)

    def input_ids(self) -> tuple[int, ...]:
        """What the next request continues from."""
        return (*self.prompt_ids, *self.token_ids) if self.token_ids else self.prompt_ids

    def routing_from(self) -> int:
        """First input token whose experts the next request should tell."""
        return self._routing.wanted_from(len(self.token_ids))

    def stop_reason(self) -> StopReason | None:
        """Why no further request is needed, or None.

        A connection can break between the last token and the word that it was the last.
        """
        if self.token_ids and self.token_ids[-1] in self._stop_token_ids:
            return StopReason.STOP
        if self.remaining <= 0:
            return StopReason.LENGTH
        return None

    def begin_attempt(self, granted_version: int) -> None:
        """A new request starts after the tokens received so far, on an engine that serves `granted_version`."""
        self._attempt_start = len(self.token_ids)
        self._granted_version = granted_version
        self._report = None

    def append(self, chunk: TokenChunk) -> None:
        """Take in new tokens; those beyond the budget are cut. Raises ValueError for a chunk that is not aligned."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise ValueError(f"{len(chunk.token_ids)} tokens but {len(chunk.logprobs)} logprobs in a chunk")
        if chunk.kept is not None and len(chunk.kept) != len(chunk.token_ids):
            raise ValueError(f"{len(chunk.token_ids)} tokens but {len(chunk.kept)} kept sets in a chunk")
        if chunk.routing is not None:
            self._routing.check(chunk.routing)
            self._report = chunk.routing
        room = self.remaining
        if len(chunk.token_ids) > room:
            self.token_ids.extend(chunk.token_ids[:room])
            self.logprobs.extend(chunk.logprobs[:room])
        else:
            self.token_ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
        self._kept.extend(chunk.kept, min(len(chunk.token_ids), room))

    def end_attempt(self, incarnation: str, labels: Sequence[LabelSpan]) -> bool:
        """Fix the versions of the present request's tokens.

        Tokens that no label covers take the version at the grant, the older candidate. Returns False, and forgets
        this request's tokens, when a label names another incarnation than `incarnation`, the lease's.
        """
        granted, end = self._granted_version, self.attempt_tokens
        versions: list[tuple[int, int, int]] = []
        done = 0
        for label in sorted(labels, key=lambda label: label.start):
            number = _version_of(label.label, incarnation)
            if number is None:
                self.discard_attempt()
                return False
            start, stop = max(label.start, done), min(label.end, end)
            if start >= stop:
                continue
            if start > done:
                versions.append((granted, done, start))
            versions.append((number, start, stop))
            done = stop
        if done < end:
            versions.append((granted, done, end))
        for number, start, stop in versions:
            self._add_span(number, self._attempt_start + start, self._attempt_start + stop, incarnation)
        if self._report is not None:
            self._routing.place(self._report, self._attempt_start, len(self.token_ids))
        self._attempt_start = len(self.token_ids)
        return True

    def discard_attempt(self) -> None:
        """Forget the tokens of the present request."""
        del self.token_ids[self._attempt_start :]
        del self.logprobs[self._attempt_start :]
        self._kept.truncate(self._attempt_start)

    def restart(self) -> None:
        """Forget every token: the trajectory begins again."""
        self.token_ids.clear()
        self.logprobs.clear()
        self.spans.clear()
        self._attempt_start = 0
        self._kept = KeptTokensBuilder()
        self._routing = RoutingBuilder(len(self.prompt_ids))

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """The finished sample, not yet scored."""
        return Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            stop_reason=stop_reason,
            kept=self._kept.build(),
            routing=self._routing.build(len(self.token_ids)),
        )

    def _add_span(self, version: int, start: int, end: int, incarnation: str) -> None:
        if self.spans:
            last = self.spans[-1]
            if last.version == version and last.incarnation == incarnation and last.end == start:
                self.spans[-1] = VersionSpan(version, last.start, end, incarnation)
                return
        self.spans.append(VersionSpan(version, start, end, incarnation))


def _version_of(label: str, incarnation: str) -> int | None:
    """The number in `incarnation:number`; None for another incarnation, or for weights that were never proven."""
    named, _, number = label.rpartition(":")
    return int(number) if named == incarnation and number.isdecimal() else None
