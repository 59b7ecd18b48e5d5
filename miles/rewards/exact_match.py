"""The reward `exact_match`: the response is the label, up to white space."""

from __future__ import annotations


def exact_match(prompt: str, response: str, label: str) -> float | None:
    """1 where response and label are the same words, else 0. An empty label abstains: nothing was there to match."""
    wanted = label.split()
    return float(response.split() == wanted) if wanted else None
