"""exact_match and boxed_math: what counts as right, and what abstains."""

from __future__ import annotations

from fractions import Fraction

import anyio.to_thread
import pytest

from miles.rewards.boxed_math import boxed_math, parse_number, unbox
from miles.rewards.exact_match import exact_match


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("1234", "1234", 1.0),
        (" 12\n34 ", "12 34", 1.0),
        ("1243", "1234", 0.0),
        ("12341", "1234", 0.0),
        ("", "1234", 0.0),
        ("Paris", "paris", 0.0),
        ("", "", None),
        ("anything", " \n", None),
    ],
)
def test_exact_match(response: str, label: str, reward: float | None) -> None:
    assert exact_match("p", response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        # O01: extraction happens exactly once, and a bare answer is an answer.
        (r"Answer: \boxed{5}", "5", 1.0),
        ("5", "5", 1.0),
        ("5", r"\boxed{5}", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        # O02
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
        (r"\boxed{1/3}", r"$\dfrac{1}{3}$", 1.0),
        (r"\boxed{0.333}", r"\frac13", 0.0),
        (r"\boxed{-\tfrac{ 1 }{2}}", "-0.5", 1.0),
        # O03: a gold that cannot be parsed gives nothing to anybody; a plain 6 can be parsed.
        (r"\boxed{999}", "", None),
        (r"\boxed{999}", "no number", None),
        (r"\boxed{}", "", None),
        (r"\boxed{x}", "x", None),
        (r"\boxed{6}", "6", 1.0),
        (r"\boxed{999}", "6", 0.0),
        # the last box counts; one that is empty, never closed or no number is no answer
        (r"first \boxed{4}, no, \boxed{5}", "5", 1.0),
        (r"first \boxed{5}, no, \boxed{4}", "5", 0.0),
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        (r"\boxed{\text{five}}", "5", 0.0),
        ("it is 5", "5", 0.0),
        # numbers as people write them
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1000.0}", "1,000", 1.0),
        (r"\boxed{+.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{$5$.}", "5", 1.0),
        (r"\boxed{1,00}", "100", 0.0),
        # neither dividing by zero nor a number without an end does harm
        (r"\boxed{\frac{1}{0}}", "1", 0.0),
        (r"\boxed{1}", "1/0", None),
        (r"\boxed{" + "9" * 100_000 + "}", "9", 0.0),
        (r"\boxed{1e999999999}", "9", 0.0),
        (r"\boxed{٥}", "5", 0.0),
    ],
)
def test_boxed_math(response: str, label: str, reward: float | None) -> None:
    assert boxed_math("p", response, label) == reward


async def test_boxed_math_scores_the_same_in_another_thread() -> None:
    """O02: a verifier that needs the main thread would raise or give 0 in the other one."""
    call = ("p", r"\boxed{\frac{1}{3}}", r"\frac{1}{3}")
    assert boxed_math(*call) == 1.0
    assert await anyio.to_thread.run_sync(boxed_math, *call) == 1.0


def test_boxes_are_opened_once_with_balanced_braces() -> None:
    assert unbox(r"so \boxed{\frac{1}{2}} {x}") == r"\frac{1}{2}"
    assert unbox("5") == "5"
    assert unbox(r"\boxed{a{b}") == ""


def test_numbers_are_compared_exactly() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number(r"\frac{-0.5}{2}") == Fraction(-1, 4)
    assert parse_number("0.1000000000000000000000000000000000001") != Fraction(1, 10)
