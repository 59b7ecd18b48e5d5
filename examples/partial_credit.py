"""A reward of one's own: the share of characters that are in their right place.

From this repository's root: `miles train CONFIG reward=examples.partial_credit:share_of_characters`.
A reward takes the texts of prompt and response and the row's label, and the row's other fields by name if it wants
them. It returns a number, or None to abstain. It may be `async`.
"""

from __future__ import annotations


def share_of_characters(prompt: str, response: str, label: str) -> float | None:
    """From 0 to 1; characters too many count as wrong ones."""
    if not label:
        return None
    written = response.strip()
    right = sum(have == wanted for have, wanted in zip(written, label, strict=False))
    return right / max(len(written), len(label))
