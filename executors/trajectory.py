"""What a rollout is made of. Token ids in, token ids out: what the engine sampled is what is trained, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from executors.sampling_record import KeptTokens, Routing


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """It sampled a stop token (kept as its last token) or matched a stop condition."""
    LENGTH = "length"
    """Its token budget, or the model's context, is used up."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weight version `version`, in one engine incarnation."""

    version: int
    start: int
    end: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `index` is its position in the data source's order: each is dispatched once."""

    index: int
    ids: tuple[int, ...]
    label: str
    text: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sample.

    `logprobs[i]` is the engine's log-probability (temperature applied) of `response_ids[i]` when it was sampled;
    `spans` partition [0, len(response_ids)). `reward` is None where the verifier abstained.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    stop_reason: StopReason
    reward: float | None = None
    mask: tuple[bool, ...] | None = None
    """Which response tokens were sampled and are trained; None means all of them."""
    kept: KeptTokens | None = None
    """The tokens each response token was drawn from; `logprobs` are then normalised over them."""
    routing: Routing | None = None
    """The experts that input tokens (all but the last response token) were routed to when they were sampled from."""

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != len(self.response_ids):
            raise ValueError(f"{len(self.response_ids)} response tokens but a mask of {len(self.mask)}")
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.response_ids)} response tokens but {len(self.logprobs)} logprobs")
        if sum(s.end - s.start for s in self.spans) != len(self.response_ids):
            raise ValueError("version spans do not cover the response")
        if self.kept is not None and len(self.kept) != len(self.response_ids):
            raise ValueError(f"{len(self.response_ids)} response tokens but {len(self.kept)} kept sets")
        if self.routing is not None and len(self.routing) != len(self.prompt_ids) + len(self.response_ids) - 1:
            raise ValueError(f"routing of {len(self.routing)} input tokens does not fit the sequence")

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled a token of it."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt. `group_id` is unique over the run, fixed in length."""

    group_id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    sampled_step: int
    """The optimizer step of the oldest weights that sampled a token of it; staleness counts from here."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step. `staleness[i]` belongs to `groups[i]`, at the moment the batch was made."""

    groups: tuple[Group, ...]
    step: int
    """The optimizer step this batch is for, counted from 1."""
    staleness: tuple[int, ...]
    version_steps: dict[int, int] = field(default_factory=dict)
    """The optimizer step of each weight version that sampled a token of it."""
