"""What to do when a request ends without an answer: go on elsewhere, begin again, or give the trajectory up.

Decisions only: executors.generation carries them out. A policy is stateless, so one serves every trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

PartialPolicy = Literal["continue", "restart", "drop"]


class Interruption(StrEnum):
    """How a request ended without its answer."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMED_OUT = "timed_out"
    """No new tokens for `request_timeout_s`."""
    ABORTED = "aborted"
    """The engine aborted it on somebody else's behalf: a weight update, or its own end."""
    REVOKED = "revoked"
    """The lease was revoked: the engine drains, or left service."""
    FOREIGN_ANSWER = "foreign_answer"
    """Another incarnation answered than the one leased."""
    REJECTED = "rejected"
    """The engine refused it with an HTTP status."""
    MALFORMED = "malformed"
    """The answer does not hold together."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One interruption, with what a decision needs."""

    kind: Interruption
    detail: str
    received: int
    """Tokens received so far, over all requests of the trajectory."""
    gained: int
    """Tokens that the interrupted request brought."""
    in_a_row: int
    """Interruptions, this one included, since tokens were last gained and kept."""
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """Send it again after `delay_s`, from the received tokens or (`keep_tokens=False`) from the prompt."""

    delay_s: float = 0.0
    keep_tokens: bool = True
    elsewhere: bool = True
    """Prefer another engine."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The trajectory, and with it its group, ends as `outcome` for `reason`."""

    reason: str
    outcome: Literal["dropped", "failed"] = "failed"


class FailurePolicy(Protocol):
    """Decides what follows an interruption."""

    def decide(self, incident: Incident) -> Retry | GiveUp:
        """What to do about it. Must give up in the end when nothing comes of retrying."""


_WORTH_RETRYING = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class RetryElsewhere:
    """The policy of `rollout`: retry on another engine, at most `max_retries` times in a row without a new token.

    A refusal that would be the same everywhere (HTTP 4xx) is not retried. `partial` says what becomes of tokens
    received before the interruption.
    """

    max_retries: int = 8
    partial: PartialPolicy = "continue"
    backoff_s: float = 0.05
    backoff_max_s: float = 2.0

    def decide(self, incident: Incident) -> Retry | GiveUp:
        """Retry unless refused for good, out of retries, or partial sequences are to be dropped."""
        if incident.kind is Interruption.REJECTED:
            if _is_too_long(incident):
                return GiveUp("prompt_too_long", outcome="dropped")
            status = incident.status or 0
            if 400 <= status < 500 and status not in _WORTH_RETRYING:
                return GiveUp(f"rejected_{status}")
        if incident.received and self.partial == "drop":
            return GiveUp("interrupted", outcome="dropped")
        keep = self.partial == "continue"
        fruitless = 0 if keep and incident.gained else incident.in_a_row
        if fruitless > self.max_retries:
            return GiveUp(f"retries_exhausted_{incident.kind}")
        delay_s = 0.0
        if fruitless and incident.kind is not Interruption.REVOKED:
            delay_s = min(self.backoff_s * 2.0 ** (fruitless - 1), self.backoff_max_s)
        return Retry(delay_s=delay_s, keep_tokens=keep, elsewhere=incident.kind is not Interruption.ABORTED)


def _is_too_long(incident: Incident) -> bool:
    """SGLang and the embedded engine answer 400 and speak of the context; a bare proxy answers 413."""
    return incident.status == 413 or (incident.status == 400 and "context" in incident.detail.lower())
