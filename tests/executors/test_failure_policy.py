"""Decisions after an interruption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from executors.failure_policy import GiveUp, Incident, Interruption, Retry, RetryElsewhere


def incident(kind: Interruption, **changes: Any) -> Incident:
    return replace(Incident(kind, detail="", received=0, gained=0, in_a_row=1), **changes)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_refusals_are_final(status: int) -> None:
    decision = RetryElsewhere().decide(incident(Interruption.REJECTED, status=status, detail="nonsense"))
    assert decision == GiveUp(f"rejected_{status}")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_overload_is_not_final(status: int) -> None:
    assert isinstance(RetryElsewhere().decide(incident(Interruption.REJECTED, status=status)), Retry)


@pytest.mark.parametrize(
    ("status", "detail"),
    [(400, "The input (90 tokens) is longer than the model's context length (64 tokens)."), (413, "too large")],
)
def test_too_long_is_a_drop(status: int, detail: str) -> None:
    decision = RetryElsewhere().decide(incident(Interruption.REJECTED, status=status, detail=detail))
    assert decision == GiveUp("prompt_too_long", outcome="dropped")


def test_backoff_doubles_up_to_a_bound_and_planned_moves_have_none() -> None:
    policy = RetryElsewhere(max_retries=20, backoff_s=0.1, backoff_max_s=1.0)
    delays = []
    for in_a_row in range(1, 7):
        decision = policy.decide(incident(Interruption.UNREACHABLE, in_a_row=in_a_row))
        assert isinstance(decision, Retry)
        delays.append(decision.delay_s)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert policy.decide(incident(Interruption.REVOKED)) == Retry()
    assert policy.decide(incident(Interruption.UNREACHABLE, received=9, gained=4)) == Retry()


def test_an_abort_by_the_engine_may_go_back_to_it() -> None:
    """A weight update aborts what has no token yet, on every engine; the same engine is as good as another."""
    decision = RetryElsewhere().decide(incident(Interruption.ABORTED))
    assert isinstance(decision, Retry) and not decision.elsewhere
