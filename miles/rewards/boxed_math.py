r"""The reward `boxed_math`: a light grader of numbers and fractions, as in `... so the answer is \boxed{\frac{1}{3}}`.

Invariant: the box is opened exactly once, here, and a bare answer is as good as a boxed one. Values are compared
exactly, as fractions. No signals, no threads, no evaluation: it may be called from anywhere.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_CHARACTERS = 200

_NUMBER = r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+"
_SIGNED = rf"[+-]?(?:{_NUMBER})"
_PLAIN = re.compile(rf"(?P<value>{_SIGNED})")
_SLASHED = re.compile(rf"(?P<top>{_SIGNED})/(?P<bottom>{_SIGNED})")
_LATEX = re.compile(
    rf"(?P<sign>[+-]?)\\[dt]?frac(?:\{{(?P<top>{_SIGNED})\}}|(?P<top_digit>[0-9]))"
    rf"(?:\{{(?P<bottom>{_SIGNED})\}}|(?P<bottom_digit>[0-9]))"
)


def boxed_math(prompt: str, response: str, label: str) -> float | None:
    r"""1 where the response's answer equals the label's, else 0.

    The answer is the content of the last `\boxed{}`, or the whole text where there is none. A label that is not a
    number abstains (None); a response that is not one scores 0.
    """
    wanted = parse_number(unbox(label))
    if wanted is None:
        return None
    return float(parse_number(unbox(response)) == wanted)


def unbox(text: str) -> str:
    r"""The content of the last `\boxed{}`, braces balanced; the text itself without one; empty if it never closes."""
    _, found, rest = text.rpartition(r"\boxed{")
    if not found:
        return text
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place]
    return ""


def parse_number(text: str) -> Fraction | None:
    r"""An integer, a decimal, `a/b` or `\frac{a}{b}`, exactly; None for anything else."""
    compact = re.sub(r"\s|\\[,!; ]", "", text).removesuffix(".").strip("$")
    if len(compact) > _MAX_CHARACTERS:  # exact arithmetic on what a model wrote must stay cheap
        return None
    if match := _PLAIN.fullmatch(compact):
        return _fraction(match["value"], "1")
    if match := _SLASHED.fullmatch(compact):
        return _fraction(match["top"], match["bottom"])
    if match := _LATEX.fullmatch(compact):
        top, bottom = match["top"] or match["top_digit"], match["bottom"] or match["bottom_digit"]
        value = _fraction(top, bottom)
        return -value if value is not None and match["sign"] == "-" else value
    return None


def _fraction(top: str, bottom: str) -> Fraction | None:
    denominator = Fraction(bottom.replace(",", ""))
    return Fraction(top.replace(",", "")) / denominator if denominator else None
