"""load_reward: how names are found, what is said about wrong ones, and what a function is called with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from miles.rewards.reward import Place, load_reward
from tests.miles.rewards import reward_functions

FUNCTIONS = reward_functions.__name__


def test_each_kind_of_function_has_its_place() -> None:
    assert load_reward("exact_match").place is Place.INLINE
    assert load_reward("boxed_math").place is Place.INLINE
    assert load_reward(f"{FUNCTIONS}:length").place is Place.PROCESS
    assert load_reward(f"{FUNCTIONS}:awaited").place is Place.LOOP


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", r"^reward: unknown name 'exact_mach'; did you mean 'exact_match'\?"),
        ("zzz", r"^reward: unknown name 'zzz'; known: boxed_math, exact_match \(or package\.module:function\)$"),
        ("no_such_module:f", r"^reward: 'no_such_module:f': cannot import 'no_such_module' \(ModuleNotFoundError"),
        (f"{FUNCTIONS}:lenght", r"^reward: .* has no 'lenght'; did you mean 'length'\?$"),
        (f"{FUNCTIONS}:NOT_A_FUNCTION", r"^reward: .*NOT_A_FUNCTION' is not a function$"),
        (f"{FUNCTIONS}:two_arguments", r"^reward: .*two_arguments' cannot be called as f\(prompt, response, label, "),
        ("module:", r"^reward: 'module:' is not of the form package\.module:function$"),
    ],
)
def test_a_wrong_name_is_quoted_with_the_nearest_right_one(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward(name)
    assert caught.value.key == "reward"


def test_a_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_of_this_test.py").write_text("def f(prompt, response, label):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert load_reward("my_rewards_of_this_test:f").call("", "", "", {}) == 1.0


def test_a_module_that_fails_is_the_fault_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_rewards_of_this_test.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^reward: .*\(ZeroDivisionError: division by zero\)"):
        load_reward("failing_rewards_of_this_test:f")


def test_functions_get_those_fields_that_they_take() -> None:
    extra = {"bonus": 2.0, "level": 3, "prompt": "a field of that name"}
    assert load_reward(f"{FUNCTIONS}:shows_extra").call("", "", "", extra) == 3.0
    assert load_reward(f"{FUNCTIONS}:takes_bonus_only").call("", "", "", extra) == 2.0
    assert load_reward(f"{FUNCTIONS}:length").call("p", "r", "l", extra) == 111.0
    assert load_reward("exact_match").call("p", "r", "r", extra) == 1.0
