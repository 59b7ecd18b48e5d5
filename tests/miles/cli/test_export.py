"""`miles export`: what comes out equals the trainer's weights; what cannot be exported is one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.cli import app as cli
from miles.config import dump_config, load_config
from miles.models.presets import write_preset
from miles.trainer.parallel import ParallelSizes
from tests.miles.trainer.tiny import random_batch
from tests.support.ranks import ranks

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
TP2 = ParallelSizes(tensor=2)
EXPORT = """
import sys
from miles.cli.app import run
code = run(["export", *sys.argv[1:]])
assert not {"ray", "nixl", "aiohttp"} & set(sys.modules), "an export needs no cluster and no engines"
sys.exit(code)
"""


def run_folder(folder: Path, *steps: int) -> Path:
    """What a run leaves, as far as the command looks before its heavy imports."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(load_config(QUICKSTART)))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    for step in steps:
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "out"], "'absent' is no run folder: it has no config.yaml"),
        (["run", "out", "--step", "7"], "there is no checkpoint of step 7 in 'run/checkpoints', only of 0, 50"),
        (["young", "out"], "'young/checkpoints' holds no checkpoint"),
        (["run", "used"], "'used' exists and is not empty"),
        (["run", "run/config.yaml"], "'run/config.yaml' exists and is not empty"),
        (["torn", "out"], "the run's model folder 'torn/model' holds no config.json"),
        (["run", "out", "--step", "x"], "Invalid value for '--step'"),
        (["run"], "Missing argument 'OUT'"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run", 0, 50)
    run_folder(tmp_path / "young")
    (run_folder(tmp_path / "torn", 0) / "model" / "config.json").unlink()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious").write_text("data")
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(["export", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and shown.err.count("\n") == 1 and shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_data_that_is_gone_does_not_matter(tmp_path: Path) -> None:
    """Fails when the command checks the configuration as a new run's: a finished run's data may have been removed."""
    run = run_folder(tmp_path / "run")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{number}", "label": "b"}}\n' for number in range(40)))
    config = load_config(QUICKSTART, {"data.source": "jsonl", "data.path": str(prompts), "train.warmup.steps": 0})
    (run / "config.yaml").write_text(dump_config(config))
    prompts.unlink()
    assert cli.run(["check", str(run / "config.yaml")]) == 2
    assert load_config(run / "config.yaml", machine=False) == config


def train_and_save(model: Path, run: Path) -> None:
    """Two steps of one rank of two, each with a checkpoint, and the weights of each as rank 0 gathers them."""
    from miles.trainer.learner import Learner
    from miles.trainer.options import TrainerOptions
    from miles.trainer.weights import global_tensors

    learner = Learner(TrainerOptions(model, parallel=TP2, lr=1e-2, lr_warmup_steps=0))
    for step in (1, 2):
        learner.step(random_batch(step))
        learner.save(run / "checkpoints" / f"step-{step:06d}")
        tensors = dict(global_tensors(dict(learner.model.named_parameters()), learner.arch, learner.place))
        if learner.place.rank == 0:
            save_file(tensors, run.parent / f"step-{step}.safetensors")


@pytest.mark.real
def test_an_export_equals_the_trainers_weights(tmp_path: Path) -> None:
    """Of a run over two tensor-parallel ranks: of the step asked for, and of the newest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    model = write_preset("tiny-qwen3", run / "model", seed=3)
    (run / "config.yaml").write_text(dump_config(load_config(QUICKSTART)))
    with ranks(2) as group:
        group.run_as(TP2, train_and_save, model, run)
    for step, option in ((1, ["--step", "1"]), (2, [])):
        out = tmp_path / f"out-{step}"
        command = [sys.executable, "-c", EXPORT, str(run), str(out), *option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
        expected = load_file(tmp_path / f"step-{step}.safetensors")
        found = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32).state_dict()
        assert len(expected) > 10 and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert AutoTokenizer.from_pretrained(str(out)).decode([72, 105]) == "Hi"
    first, second = (load_file(tmp_path / f"step-{step}.safetensors") for step in (1, 2))
    assert not any(torch.equal(first[name], second[name]) for name in first), "steps must differ"


@pytest.mark.real
def test_a_checkpoint_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5)
    write_preset("tiny-qwen3", tmp_path / "preset", seed=3)
    (run / "model" / "config.json").write_text((tmp_path / "preset" / "config.json").read_text())
    (run / "checkpoints" / "step-000005" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    command = [sys.executable, "-c", EXPORT, str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: CheckpointFailed: ") and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()
