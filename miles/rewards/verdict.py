"""What came of one call of a reward function. The same sorting is used in the driver and in a worker process."""

from __future__ import annotations

import math
from enum import StrEnum


class Verdict(StrEnum):
    """Whether there is a reward and, if not, why: all but SCORED are abstentions."""

    SCORED = "scored"
    ABSTAINED = "abstained"
    """The function returned None."""
    NOT_FINITE = "not_finite"
    """It returned NaN or an infinity."""
    ERROR = "error"
    """It raised, or returned something that is not a number."""
    TIMEOUT = "timeout"
    """It did not return in time."""
    CRASHED = "crashed"
    """Its worker process ended, or did not start."""


Answer = tuple[Verdict, float | str | None]
"""With SCORED goes the reward, with ERROR, TIMEOUT and CRASHED what was wrong, in words."""


def judge(value: object) -> Answer:
    """Sort what a reward function returned. NumPy scalars and tensors of one element are numbers too."""
    if value is None:
        return Verdict.ABSTAINED, None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return Verdict.ERROR, f"returned {type(value).__name__}, not a number"
    return (Verdict.SCORED, reward) if math.isfinite(reward) else (Verdict.NOT_FINITE, None)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
