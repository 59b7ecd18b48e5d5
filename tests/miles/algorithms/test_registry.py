"""Names, paths and options of the algorithm's parts, and what the options refuse."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from controllers.errors import ConfigError
from miles.algorithms import registry
from miles.algorithms.advantages.sample import Sample
from miles.algorithms.objective import Objective
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions, OverlongOptions
from miles.algorithms.overlong import overlong_penalty
from miles.algorithms.registry import Kind
from tests.miles.algorithms import references
from tests.miles.algorithms.cases import CASES, fresh

OWN = "tests.miles.algorithms.own_functions"


def test_every_name_leads_to_a_documented_function_of_that_name() -> None:
    for kind, names in registry.BUILT_IN.items():
        for name in names:
            function = registry.load(kind, name)
            assert function.__name__ == name
            assert function.__doc__, name
            registry.check(kind, name)


def test_built_in_parts_need_no_torch() -> None:
    """`miles check` reads their options. Fails when one of them imports torch at its top."""
    program = (
        "import sys\n"
        "from miles.algorithms import objective, registry\n"
        "from miles.trainer import rl_batch\n"
        "[registry.check(kind, name) for kind, names in registry.BUILT_IN.items() for name in names]\n"
        "assert not {'torch', 'numpy', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("advantage", "gpro", r"algorithm\.advantage: unknown name 'gpro'; did you mean 'grpo'"),
        ("advantage", "math:", "not of the form package.module:function"),
        ("loss", "no_such_module_x:f", r"algorithm\.loss: .*cannot import 'no_such_module_x'"),
        ("loss", "math:no_such_function", "has no 'no_such_function'"),
        ("loss", "math:pi", "is not a function"),
        ("kl", "k4", r"algorithm\.kl\.estimator: unknown name 'k4'"),
        ("correction", "ice_pop", r"algorithm\.correction\.name: .*did you mean 'icepop'"),
        ("aggregation", "tokens_mean", r"algorithm\.aggregation: .*did you mean 'token_mean'"),
    ],
)
def test_unknown_names_are_refused(kind: Kind, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        registry.load(kind, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "options", "said"),
    [
        ("advantage", "grpo", {"scale": 1}, r"algorithm\.advantage_options\.scale: unknown key; did you mean"),
        (
            "advantage",
            "grpo",
            {"eps": "much"},
            r"algorithm\.advantage_options\.eps: must be a valid number, got 'much'",
        ),
        ("advantage", "grpo", {"eps": -0.1}, r"algorithm\.advantage_options\.eps: must be .*0, got -0.1"),
        ("advantage", "rloo", {"scale_by_std": 1}, r"algorithm\.advantage_options\.scale_by_std: must be a valid bool"),
        ("advantage", "dr_grpo", {"eps": 0.1}, r"algorithm\.advantage_options\.eps: unknown key"),
        ("loss", "clipped", {"dual_clip": 0.5}, r"algorithm\.loss_options\.dual_clip: must be greater than 1"),
        ("loss", "clipped", {"clip": [0.2]}, r"algorithm\.loss_options\.clip"),
        ("loss", "gspo", {"dual_clip": 3.0}, r"algorithm\.loss_options\.dual_clip: unknown key"),
        ("correction", "tis", {"cap": 0}, r"algorithm\.correction\.options\.cap: must be greater than 0, got 0"),
        ("correction", "mis", {"level": "word"}, r"algorithm\.correction\.options\.level: must be 'token' or 'seq"),
        ("correction", "icepop", {"high": None}, r"algorithm\.correction\.options\.high: must be a valid number"),
    ],
)
def test_wrong_options_are_one_line_that_names_the_key(
    kind: Kind, name: str, options: dict[str, object], said: str
) -> None:
    for refuse in (registry.check, registry.load):
        with pytest.raises(ConfigError, match=said) as caught:
            refuse(kind, name, options)
        assert "\n" not in str(caught.value)


def test_lists_of_a_yaml_file_will_do() -> None:
    tokens = fresh(CASES["random"])
    loss = registry.load("loss", "clipped", {"clip": [0.1, 0.4], "dual_clip": 3})
    assert torch.equal(
        loss(tokens, tokens.behaviour).values,
        registry.load("loss", "clipped", {"clip": (0.1, 0.4), "dual_clip": 3.0})(tokens, tokens.behaviour).values,
    )


def test_a_persons_own_functions() -> None:
    assert registry.load("advantage", f"{OWN}:signs", {"scale": 2.0})([[Sample(1.0), Sample(0.0)]]) == [[2.0, -2.0]]
    options = AlgorithmOptions(
        advantage=f"{OWN}:signs",
        loss=f"{OWN}:squared",
        loss_options={"power": 3},
        aggregation=f"{OWN}:halved",
        correction=CorrectionOptions(f"{OWN}:double", {"whatever": 1.0}),
    )
    registry.load_all(options)
    tokens = fresh(CASES["random"])
    result = Objective(options)(tokens)
    torch.testing.assert_close(result.values, 2.0 * tokens.logprobs**3)
    with pytest.raises(ConfigError, match=r"algorithm\.loss_options\.powr: unknown key; did you mean 'power'"):
        registry.load("loss", f"{OWN}:squared", {"powr": 3})
    registry.check("loss", "no_such_module_x:f", {"anything": 1})  # not looked for before a run starts


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KlOptions(-1.0), r"algorithm\.kl\.coefficient"),
        (lambda: KlOptions(float("nan")), r"algorithm\.kl\.coefficient"),
        (lambda: KlOptions(0.1, "k1", gradient="estimator"), r"algorithm\.kl\.gradient: .*'reverse_kl'"),
        (lambda: AlgorithmOptions(entropy_coefficient=float("inf")), r"algorithm\.entropy_coefficient"),
        (lambda: AlgorithmOptions(max_token_staleness=-1), r"algorithm\.max_token_staleness"),
        (lambda: AlgorithmOptions(max_tokens=0), r"rollout\.max_tokens"),
        (lambda: AlgorithmOptions(max_tokens=8, overlong=OverlongOptions(9)), r"algorithm\.overlong\.buffer"),
        (lambda: AlgorithmOptions(max_tokens=8, overlong=OverlongOptions(0)), r"algorithm\.overlong\.buffer"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(("longest", "buffer"), [(16, 4), (8, 8), (1, 1), (20480, 4096)])
def test_the_overlong_penalty_is_dapos(longest: int, buffer: int) -> None:
    for length in {0, 1, longest - buffer - 1, longest - buffer, longest - buffer + 1, longest - 1, longest}:
        if length >= 0:
            found = overlong_penalty(length, max_tokens=longest, buffer=buffer, penalty=0.5)
            assert found == pytest.approx(-0.5 * references.overlong_reward(length, longest, buffer))
