"""DAPO's overlong reward shaping: a response that comes near the length limit costs something, little by little."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """What is subtracted from the reward of a response of `length` tokens: 0 up to `max_tokens` - `buffer`, from there
    rising linearly to `penalty` at `max_tokens`.

    Source: equation 13 of DAPO (arXiv 2503.14476).
    """
    beyond = length - (max_tokens - buffer)
    return penalty * min(max(beyond / buffer, 0.0), 1.0)
