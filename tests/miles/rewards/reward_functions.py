"""Reward functions as a person might write them, found by dotted name; some are broken on purpose."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import anyio

NOT_A_FUNCTION = 1


def length(prompt: str, response: str, label: str) -> float:
    return float(len(prompt) * 100 + len(response) * 10 + len(label))


def shows_extra(prompt: str, response: str, label: str, *, bonus: float = 0.0, **others: Any) -> float:
    return bonus + len(others)


def takes_bonus_only(prompt: str, response: str, label: str, bonus: float) -> float:
    return bonus


def two_arguments(response: str, label: str) -> float:
    return 1.0


async def awaited(prompt: str, response: str, label: str) -> float:
    await anyio.lowlevel.checkpoint()
    return 0.5


async def awaited_for_ever(prompt: str, response: str, label: str) -> float:
    await anyio.sleep_forever()
    return 1.0


def hangs_on_request(prompt: str, response: str, label: str) -> float:
    if response == "hang":
        print("it hangs", flush=True)
        signal.pause()
    return 1.0


def process_id(prompt: str, response: str, label: str) -> float:
    print("a line that must not come between the messages")
    return float(os.getpid())


def dies(prompt: str, response: str, label: str) -> float:
    os._exit(3)


def by_response(prompt: str, response: str, label: str) -> Any:
    """None, NaN, an infinity, a text, an exception or a number, as the response says."""
    if response == "raise":
        raise ValueError("no\nidea")
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "true": True}[response]


def hands_on_a_coroutine(prompt: str, response: str, label: str) -> Any:
    return awaited(prompt, response, label)


def uses_an_alarm(prompt: str, response: str, label: str) -> float:
    """As math verifiers do to limit their time. Raises off the main thread."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return float(response == label)


def busy(prompt: str, response: str, label: str) -> float:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    return 1.0


def waits(prompt: str, response: str, label: str) -> float:
    time.sleep(0.3)
    return 1.0
