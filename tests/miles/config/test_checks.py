"""Checks against the machine: model folders, data files, names of code, ports; and combinations of keys."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from miles.cli.app import run
from miles.config import check_ports, load_config
from miles.models.presets import write_preset
from miles.trainer.model_cut import check_cut
from miles.trainer.parallel import ParallelSizes

BASE = "data: {source: sort_digits}\ntrain: {steps: 10}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(BASE)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_rolling_restart_must_leave_an_engine(config_file: Path) -> None:
    """Fails when the check of inference.max_unavailable in schema._cross_check is removed."""
    line = refusal(config_file, "inference.rolling_restart_at_step=5", "inference.max_unavailable=2")
    assert line.startswith("command line: inference.max_unavailable: must be below engines.count (2)")
    load_config(config_file, ["inference.max_unavailable=2"])
    load_config(config_file, ["inference.rolling_restart_at_step=5", "engines.count=1"])


def test_a_response_must_fit_the_context_with_a_prompt(config_file: Path) -> None:
    line = refusal(config_file, "rollout.max_tokens=512")
    assert line.startswith("command line: rollout.max_tokens: ")
    assert line.endswith("context of 512 tokens, got 512")
    load_config(config_file, ["rollout.max_tokens=511"])


def test_a_model_folder_without_weights_is_refused(config_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8, "max_position_embeddings": 16})
    )
    line = refusal(config_file, f"model.path={folder}")
    assert line.startswith(f"command line: model.path: '{folder}' has no weights")


def test_a_size_of_a_model_that_is_no_number_is_one_line(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when config.json is counted with before it is checked: a traceback."""
    folder = write_preset("tiny-qwen3", tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_attention_heads": "four"}))
    assert run(["check", str(config_file), f"model.path={folder}"]) == 2
    line = f"model.path: '{folder}' has a config.json whose num_attention_heads is 'four', not a positive integer"
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1


def test_a_missing_model_folder_and_an_unknown_preset_are_refused(config_file: Path, tmp_path: Path) -> None:
    assert f"model.path: '{tmp_path / 'no'}'" in refusal(config_file, f"model.path={tmp_path / 'no'}")
    line = refusal(config_file, "model.preset=tiny-qwen")
    assert line == "command line: model.preset: unknown preset 'tiny-qwen'; did you mean 'tiny-qwen3'?"
    assert "model.preset: either" in refusal(config_file, "model.preset=null")


def test_jsonl_needs_a_file_that_exists(config_file: Path, tmp_path: Path) -> None:
    assert "data.path: the source 'jsonl' needs a file" in refusal(config_file, "data.source=jsonl")
    missing = tmp_path / "no.jsonl"
    line = refusal(config_file, "data.source=jsonl", f"data.path={missing}")
    assert line.startswith("command line: data.path: ")
    assert str(missing) in line


def test_jsonl_names_a_wrong_field(config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "1+1", "label": "2"}\n{"question": "1+2", "label": "3"}\n')
    line = refusal(config_file, "data.source=jsonl", f"data.path={file}")
    assert "data.prompt_key" in line
    assert "'prompt'" in line
    load_config(config_file, ["data.source=jsonl", f"data.path={file}", "data.prompt_key=question"])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.source=sort_digts", ("data.source", "'sort_digts'", "sort_digits")),
        ("data.options={digit: 3}", ("data.options.digit", "digits", "(value 3)")),
        ("reward=exact_mach", ("reward", "'exact_mach'", "exact_match")),
        ("algorithm.advantage=grop", ("algorithm.advantage", "'grop'", "grpo")),
        ("algorithm.advantage=:grpo", ("algorithm.advantage", "':grpo'", "package.module:function")),
        ("algorithm.advantage_options={scale: 1}", ("algorithm.advantage_options.scale", "scale_by_std")),
        ("algorithm.loss=cliped", ("algorithm.loss", "'cliped'", "clipped")),
    ],
)
def test_names_of_code_are_checked_and_suggested(config_file: Path, override: str, parts: tuple[str, ...]) -> None:
    line = refusal(config_file, override)
    assert line.startswith("command line: ")
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["tensor_parallel=4"], "trainer.tensor_parallel: 4 ranks cannot share 2 key/value heads"),
        (["pipeline_parallel=3"], "trainer.pipeline_parallel: 3 ranks cannot share 2 layers"),
        (["expert_parallel=2"], "trainer.expert_parallel = 2 must divide data_parallel x context_parallel = 1"),
        (["expert_parallel=2", "data_parallel=2"], "trainer.expert_parallel: the model has no experts to share over 2"),
        (["sequence_parallel=true"], "trainer.sequence_parallel needs trainer.tensor_parallel above 1, got 1"),
        (["data_parallel=0"], "trainer.data_parallel: must be at least 1, got 0"),
        (["dtype=bfloat16"], "trainer.dtype: needs trainer.device: cuda, got 'bfloat16'"),
        (["recompute=true"], "trainer.recompute: needs trainer.device: cuda, got true"),
        (["optimizer.betas=[0.9, 1.0]"], "trainer.optimizer.betas.1: must be below 1, got 1.0"),
        (["optimizer.betas=[1.0, 0.9]"], "trainer.optimizer.betas.0: must be below 1, got 1.0"),
        (["backend=a:b:c"], "trainer.backend: 'a:b:c' is not of the form package.module:function"),
        (["backend=a b:c"], "trainer.backend: 'a b:c' is not of the form package.module:function"),
        (["backend=own:make", "rebuilds=1"], "trainer.rebuilds: only 'megatron' has it, got 1"),
        (["backend=own:make", "bad_steps=stop"], "trainer.bad_steps: only 'megatron' has it, got 'stop'"),
        (["backend=megatrn"], "trainer.backend: unknown name 'megatrn'; did you mean 'megatron'?"),
        (["backend_options={lr: 1}"], "trainer.backend_options: 'megatron' has none"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused(config_file: Path, overrides: list[str], line: str) -> None:
    """Without a look at the model's shape all of the first four would only fail on the ranks, a minute later."""
    refused = refusal(config_file, *[f"trainer.{override}" for override in overrides])
    assert refused.startswith(f"command line: {line}")


def test_sizes_that_fit_and_other_trainers_pass(config_file: Path) -> None:
    fitting = ["tensor_parallel=2", "sequence_parallel=true", "pipeline_parallel=2", "data_parallel=3"]
    config = load_config(config_file, [f"trainer.{override}" for override in fitting])
    assert config.trainer.parallel_sizes().world_size == 12
    load_config(config_file, ["trainer.backend=no_such_module.inner:Made.by", "trainer.tensor_parallel=4"])
    load_config(config_file, ["trainer.device=cuda", "trainer.dtype=bfloat16"])


def test_the_shape_is_that_of_the_models_folder(config_file: Path, tmp_path: Path) -> None:
    """With 4 key/value heads 4 ranks fit; and experts are counted."""
    folder = write_preset("tiny-qwen3", tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": 4}))
    load_config(config_file, [f"model.path={folder}", "trainer.tensor_parallel=4"])
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 experts"):
        check_cut({**shape, "num_experts": 6}, ParallelSizes(data=4, expert=4))
    check_cut({**shape, "num_experts": 8}, ParallelSizes(data=4, expert=4))


def test_a_replay_and_rollouts_alone_exclude_each_other(config_file: Path) -> None:
    line = refusal(config_file, "debug.rollout_only=true", "debug.replay=runs/first/batches")
    assert line.startswith("command line: debug.rollout_only: ")


def test_a_persons_own_code_is_not_imported_by_a_check(config_file: Path) -> None:
    config = load_config(config_file, ["reward=no_such_module:score", "data.source=no_such_module:source"])
    assert config.reward == "no_such_module:score"


def test_a_port_that_is_taken_is_named(config_file: Path) -> None:
    """Fails when check_ports does not try every engine's port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        config = load_config(config_file, [f"engines.port={taken - 1}", "engines.count=2"])
        with pytest.raises(ConfigError, match=rf"^engines\.port: 127\.0\.0\.1:{taken} is taken"):
            check_ports(config)
    check_ports(load_config(config_file, []))
