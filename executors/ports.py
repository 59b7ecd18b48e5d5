"""What the data plane needs from outside, besides a SamplingClient, as Protocols.

`controllers.inference_controller` offers leases, `miles.data` prompts and `miles.rewards` scores; `tests/fakes` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from controllers.weight_versions import WeightVersion
from executors.trajectory import Prompt


class Revocation(Protocol):
    """Set once, when the engine of a lease drains or is gone; set from the event loop."""

    @property
    def reason(self) -> str | None:
        """Why, once it is set."""

    @property
    def deadline(self) -> float | None:
        """Until when (event loop clock, seconds) the engine still answers, once it is set."""

    def is_set(self) -> bool:
        """Whether the lease has been revoked."""

    async def wait(self) -> object:
        """Return when the lease is revoked."""


class Lease(Protocol):
    """The right to generate on one incarnation of one engine, until the lease's block is left."""

    @property
    def engine(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def version(self) -> WeightVersion:
        """The version proven at the time of the grant. The engine may be updated while the lease is held."""

    @property
    def cache_salt(self) -> str:
        """Goes into every request, so that prefix KV of older weights is not reused."""

    @property
    def revoked(self) -> Revocation: ...

    def note_tokens(self, count: int) -> None:
        """Tell that `count` tokens came from the engine: a sign of life."""


class LeaseSource(Protocol):
    """Grants leases on serving engines. `InferenceController` is one."""

    def lease(
        self, *, exclude: frozenset[str] = frozenset(), sticky: str | None = None, timeout_s: float
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait for a free slot on a serving engine, avoiding those in `exclude` (engine ids) where others may serve.

        Raises WaitTimeout after `timeout_s`, and FleetDegraded when no engine is left and none will come.
        """


class PromptSource(Protocol):
    """Prompts in a fixed order, each handed out once."""

    @property
    def position(self) -> int:
        """How many prompts have been handed out, those before a resume included: the journal's data cursor."""

    def next(self) -> Prompt | None:
        """The next prompt; None when there are no more, however often it is asked."""


class RewardScorer(Protocol):
    """Scores a response. Slow work belongs off the event loop; that is the scorer's business.

    A call must end: the executor waits for it, and its group stays in flight meanwhile. `miles.rewards` gives every
    call of a reward function a deadline.
    """

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        """The reward, or None to abstain. Raising abstains too, and is counted."""
