"""The `algorithm` section: what `miles check` refuses, and that every key arrives in the trainer's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.errors import ConfigError
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions, OverlongOptions
from miles.cli.app import run
from miles.config import load_config
from miles.config.algorithm import AlgorithmConfig
from miles.part_options import algorithm_options

BASE = "data: {source: sort_digits}\ntrain: {steps: 10}\nrollout: {max_tokens: 16}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(BASE)
    return file


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("advantage=grop", "algorithm.advantage: unknown name 'grop'; did you mean 'grpo'?"),
        (
            "advantage_options={scale: 1}",
            "algorithm.advantage_options.scale: unknown key; did you mean 'scale_by_std'? (value 1)",
        ),
        ("advantage_options={eps: yes}", "algorithm.advantage_options.eps: must be a valid number, got 'yes'"),
        ("loss=cliped", "algorithm.loss: unknown name 'cliped'; did you mean 'clipped'?"),
        ("loss_options={dual_clip: 0.5}", "algorithm.loss_options.dual_clip: must be greater than 1, got 0.5"),
        ("loss_options={clip: [0.1, 0.2]}", "algorithm.loss_options.clip: is algorithm.clip, got [0.1, 0.2]"),
        ("aggregation=mean", "algorithm.aggregation: unknown name 'mean'; did you mean 'token_mean'?"),
        ("kl={coefficient: 0.1, estimator: k4}", "algorithm.kl.estimator: unknown name 'k4'; did you mean 'k3'?"),
        ("kl={estimator: k3}", "algorithm.kl.coefficient: is required"),
        ("kl={coefficient: -1}", "algorithm.kl.coefficient: must be at least 0, got -1"),
        ("kl={coefficient: 1, place: both}", "algorithm.kl.place: must be 'loss' or 'reward', got 'both'"),
        (
            "kl={coefficient: 1, estimator: k1, gradient: estimator}",
            "algorithm.kl.gradient: that of k1 is 0 on average, use 'reverse_kl', got 'estimator'",
        ),
        ("correction={name: tiss}", "algorithm.correction.name: unknown name 'tiss'; did you mean 'tis'?"),
        (
            "correction={name: tis, options: {cap: -1}}",
            "algorithm.correction.options.cap: must be greater than 0, got -1",
        ),
        (
            "correction={name: icepop, options: {level: token}}",
            "algorithm.correction.options.level: unknown key; known: high, low (value 'token')",
        ),
        (
            "correction={name: mis, options: {low: 3, high: 2}}",
            "algorithm.correction.options.low: must be at most algorithm.correction.options.high (2), got 3",
        ),
        (
            "correction={name: icepop, options: {high: 0.25}}",
            "algorithm.correction.options.low: must be at most algorithm.correction.options.high (0.25), got 0.5",
        ),
        (
            "kl={coefficient: 1, place: reward, gradient: estimator}",
            "algorithm.kl.gradient: a KL in the reward has no gradient, got 'estimator'",
        ),
        ("correction={name: tis, nam: x}", "unknown key 'algorithm.correction.nam', did you mean 'algorithm.correct"),
        ("overlong={buffer: 17}", "algorithm.overlong.buffer: must be at most rollout.max_tokens (16), got 17"),
        ("max_token_staleness=-1", "algorithm.max_token_staleness: must be at least 0, got -1"),
        ("entropy_coefficient=.nan", "algorithm.entropy_coefficient: must be a finite number, got NaN"),
        ("clip=[1.5, 0.2]", "algorithm.clip.0: must be at most 1, got 1.5"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_key(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [f"algorithm.{override}"])
    line = str(caught.value)
    assert line.startswith(f"command line: {message}")
    assert "\n" not in line


@pytest.mark.parametrize("loss", ["reinforce", "supervised"])
def test_a_loss_that_does_not_clip_takes_no_bounds(config_file: Path, loss: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.clip: the loss '{loss}' does not clip, got \[0.1, 0.2\]"):
        load_config(config_file, [f"algorithm.loss={loss}", "algorithm.clip=[0.1, 0.2]"])
    load_config(config_file, [f"algorithm.loss={loss}"])


def test_options_that_a_supervised_loss_would_not_read_are_refused(config_file: Path) -> None:
    supervised = {"algorithm.loss": "supervised", "algorithm.kl": {"coefficient": 0.1}}
    load_config(config_file, supervised)
    for key, value in (("kl", {"coefficient": 0.1, "place": "reward"}), ("advantage_options", {"eps": 0.1})):
        with pytest.raises(ConfigError, match=rf"algorithm\.{key}.*: the loss 'supervised' looks at no "):
            load_config(config_file, supervised | {f"algorithm.{key}": value})


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_baseline_needs_a_group(config_file: Path, advantage: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size: advantage .* compares samples"):
        load_config(config_file, [f"algorithm.advantage={advantage}", "rollout.group_size=1"])
    load_config(config_file, ["algorithm.advantage=reinforce_plus_plus", "rollout.group_size=1"])


def test_a_wrong_part_is_exit_2_of_miles_check(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(config_file), "algorithm.correction={name: tiss}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_key_arrives(config_file: Path) -> None:
    """Fails when a key of the section is not mapped in `part_options`."""
    given = {
        "advantage": "rloo",
        "advantage_options": {"eps": 0.5},
        "loss": "gspo",
        "clip": [0.1, 0.3],
        "loss_options": {},
        "aggregation": "sequence_mean",
        "kl": {"coefficient": 0.5, "estimator": "k2", "place": "loss", "gradient": "estimator"},
        "entropy_coefficient": 0.25,
        "correction": {"name": "tis", "options": {"cap": 3.0}, "proximal": "interpolated"},
        "overlong": {"buffer": 4, "penalty": 0.5},
        "max_token_staleness": 2,
    }
    assert set(given) == set(AlgorithmConfig.model_fields)
    config = load_config(config_file, {f"algorithm.{key}": value for key, value in given.items()})
    assert algorithm_options(config) == AlgorithmOptions(
        advantage="rloo",
        advantage_options={"eps": 0.5},
        loss="gspo",
        loss_options={"clip": (0.1, 0.3)},
        aggregation="sequence_mean",
        max_tokens=16,
        kl=KlOptions(0.5, "k2", "loss", "estimator"),
        entropy_coefficient=0.25,
        correction=CorrectionOptions("tis", {"cap": 3.0}, "interpolated"),
        overlong=OverlongOptions(4, 0.5),
        max_token_staleness=2,
    )
    both = {"algorithm.loss": "clipped", "algorithm.loss_options": {"dual_clip": 3.0}, "algorithm.clip": [0.1, 0.3]}
    assert algorithm_options(load_config(config_file, both)).loss_options == {"clip": (0.1, 0.3), "dual_clip": 3.0}
    assert algorithm_options(load_config(config_file)) == AlgorithmOptions(max_tokens=16)
