"""Files and overrides to a RunConfig; every fault is one line that names the key and quotes the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from miles.config import RunConfig, dump_config, load_config

MINIMAL = "data: {source: sort_digits}\ntrain: {steps: 10}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


def test_defaults_fill_what_the_file_leaves_out(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.engines.count == 2
    assert config.rollout.max_staleness == 1
    assert config.weight_sync.transport == "rdt"
    assert config.run.dir == Path("runs/run")


def test_run_dir_follows_the_name_unless_given(minimal: Path) -> None:
    assert load_config(minimal, ["run.name=mine"]).run.dir == Path("runs/mine")
    assert load_config(minimal, ["run.name=mine", "run.dir=other"]).run.dir == Path("other")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("3e-4", 3e-4), ("1e6", 1e6), ("1.0e5", 1e5), ("1.0e-5", 1e-5), ("1E-5", 1e-5), ("+.5", 0.5)],
)
def test_exponents_are_numbers_in_file_and_override(tmp_path: Path, text: str, value: float) -> None:
    """O30. Fails when yaml_text's float resolver is taken away: YAML 1.1 reads the first four as strings."""
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + f"trainer: {{optimizer: {{lr: {text}}}}}\n")
    assert load_config(file).trainer.optimizer.lr == value
    file.write_text(MINIMAL)
    assert load_config(file, [f"trainer.optimizer.lr={text}"]).trainer.optimizer.lr == value


def test_a_number_that_is_none_names_its_key(minimal: Path) -> None:
    """O30, second half."""
    line = refusal(minimal, "trainer.optimizer.lr=abc")
    assert line == "command line: trainer.optimizer.lr: must be a number, got 'abc'"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engines.cuont=3", "unknown key 'engines.cuont', did you mean 'engines.count'?"),
        ("rolout.group_size=3", "unknown key 'rolout', did you mean 'rollout'?"),
        ("group_size=3", "unknown key 'group_size', did you mean 'rollout.group_size'?"),
        ("engines.count=0", "engines.count: must be at least 1, got 0"),
        ("engines.count=2.5", "engines.count: must be a whole number, got 2.5"),
        ("engines.count=true", "engines.count: must be a whole number, got true"),
        ("engines.count='2'", "engines.count: must be a whole number, got '2'"),
        ("engines=3", "engines: must be a section of keys, got 3"),
        ("engines.kind=sglang", "engines.kind: is not supported by this version (supported: 'embedded'), got 'sglang'"),
        ("engines.kind=vllm", "engines.kind: must be 'embedded', got 'vllm'"),
        ("engines.port=80", "engines.port: must be at least 1024, got 80"),
        ("engines.port=65535", "engines.port: 2 engines need ports up to 65535, got 65535"),
        ("rollout.group_size=1", "rollout.group_size: advantage 'grpo' compares samples, so at least 2 a group, got 1"),
        ("rollout.max_staleness=-1", "rollout.max_staleness: must be at least 0, got -1"),
        ("rollout.top_k=0", "rollout.top_k: must be -1 (off) or at least 1, got 0"),
        (
            "rollout.sampling_mask=true",
            "rollout.sampling_mask: without rollout.top_p or rollout.top_k every token is kept, got true",
        ),
        ("rollout.routing_replay=true", "rollout.routing_replay: the embedded engine tells no experts, got true"),
        ("rollout.temperature=.inf", "rollout.temperature: must be a finite number, got Infinity"),
        ("weight_sync.n_slots=1", "weight_sync.n_slots: must be at least 2, got 1"),
        ("weight_sync.mode=hold", "weight_sync.mode: must be 'abort', 'retract' or 'in_place', got 'hold'"),
        ("weight_sync.max_updating=3", "weight_sync.max_updating: must be at most engines.count (2), or null, got 3"),
        ("weight_sync.transport=rtd", "weight_sync.transport: unknown transport 'rtd'; did you mean 'rdt'?"),
        ("engines.tensor_parallel=2", "engines.tensor_parallel: only 1 is supported by this version, got 2"),
        ("trainer.dtype=half", "trainer.dtype: must be 'float32' or 'bfloat16', got 'half'"),
        ("algorithm.clip=[0.2]", "algorithm.clip: has too few entries, got [0.2]"),
        ("algorithm.clip=[0.2, 0.3, 0.4]", "algorithm.clip: has too many entries, got [0.2, 0.3, 0.4]"),
        ("algorithm.clip=0.2", "algorithm.clip: must be a list, got 0.2"),
        ("train.steps=", "train.steps: must be a whole number, got null"),
        ("train.steps.x=1", "unknown key 'train.steps.x': 'train.steps' is a value, not a section"),
        ("run.name=3", "run.name: must be a string, got 3"),
        ("run={a: [", "run: line 1, column 6:"),
        ("steps", "expected key.path=value, got 'steps'"),
        ("=3", "expected key.path=value, got '=3'"),
    ],
)
def test_a_bad_override_is_one_line_with_key_and_value(minimal: Path, override: str, message: str) -> None:
    line = refusal(minimal, override)
    assert line.startswith(f"command line: {message}")
    assert "\n" not in line


def test_a_fault_in_the_file_names_the_file(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "engines: {count: none}\n")
    assert refusal(minimal, "run.name=x") == f"{minimal}: engines.count: must be a whole number, got 'none'"


def test_every_problem_gets_its_line(minimal: Path) -> None:
    assert refusal(minimal, "engines.count=0", "rollout.max_staleness=-1").splitlines() == [
        "command line: engines.count: must be at least 1, got 0",
        "command line: rollout.max_staleness: must be at least 0, got -1",
    ]


def test_a_required_key_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {source: sort_digits}\ntrain: {groups_per_step: 4}\n")
    assert refusal(file) == f"{file}: train.steps: is required"


def test_a_key_given_twice_is_refused(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "engines: {count: 1, count: 2}\n")
    assert refusal(minimal) == f"{minimal}: line 3, column 21: key 'count' is given twice"


def test_yes_and_dates_are_strings_and_octal_is_not_guessed(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "engines: {args: {a: yes, b: 2026-11-30, c: 010, d: 0x10, e: 1:30, f: null, g: ~}}\n")
    assert load_config(minimal).engines.args == {
        "a": "yes", "b": "2026-11-30", "c": 10, "d": 16, "e": "1:30", "f": None, "g": None,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "3", "- a\n- b\n"])
def test_a_file_without_sections_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert refusal(file).startswith(f"{file}: must hold sections of keys, got ")


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == f"config file '{tmp_path / 'no.yaml'}' does not exist"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert refusal(binary).startswith(f"config file '{binary}' cannot be read: ")
    assert refusal(tmp_path).startswith(f"config file '{tmp_path}' cannot be read: ")


def test_overrides_may_be_a_mapping_and_leave_it_alone(minimal: Path) -> None:
    overrides: dict[str, Any] = {"train.steps": 50, "engines.args": {"x": 1}, "trainer.optimizer.lr": 1}
    config = load_config(minimal, overrides)
    assert (config.train.steps, config.engines.args, config.trainer.optimizer.lr) == (50, {"x": 1}, 1.0)
    assert overrides == {"train.steps": 50, "engines.args": {"x": 1}, "trainer.optimizer.lr": 1}
    with pytest.raises(ConfigError, match=r"^overrides: train.steps: must be a whole number, got 'many'$"):
        load_config(minimal, {"train.steps": "many"})


def test_the_last_of_two_overrides_of_a_key_wins(minimal: Path) -> None:
    assert load_config(minimal, ["train.steps=3", "train.steps=4"]).train.steps == 4


def test_the_resolved_yaml_loads_back_equal(minimal: Path, tmp_path: Path) -> None:
    given = ["trainer.optimizer.lr=1e-7", "run.name='1e5'", "engines.args={a: '1e5', b: 'yes', c: [1, x], d: 1e-9}"]
    config = load_config(minimal, given)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


def test_a_config_is_frozen(minimal: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal).train.steps = 3


def test_every_key_is_documented() -> None:
    def undocumented(schema: dict[str, Any], name: str) -> list[str]:
        return [
            f"{name}.{key}" for key, field in schema.get("properties", {}).items() if not field.get("description")
        ]

    schema = RunConfig.model_json_schema()
    missing = undocumented(schema, "RunConfig")
    for name, section in schema["$defs"].items():
        missing += undocumented(section, name)
    assert missing == []
