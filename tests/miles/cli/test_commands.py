"""Exit codes and what is printed where."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.errors import FleetDegraded
from miles.cli import app as cli
from miles.cli import main
from miles.config import dump_config, load_config
from tests.miles.telemetry.synthetic_run import write_synthetic_run

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


def test_check_prints_a_yaml_that_loads_back_equal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["check", QUICKSTART, "train.steps=7"]) == 0
    resolved = tmp_path / "resolved.yaml"
    shown = capsys.readouterr()
    resolved.write_text(shown.out)
    assert shown.err == ""
    assert load_config(resolved) == load_config(QUICKSTART, ["train.steps=7"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "no.yaml"], "config file 'no.yaml' does not exist"),
        (["check", QUICKSTART, "engines.cuont=1"], "command line: unknown key 'engines.cuont', did you mean"),
        (["train", QUICKSTART, "rollout.group_size=1"], "command line: rollout.group_size: "),
        (["train", QUICKSTART, "--resume"], "--resume is not built yet"),
        (["train"], "Missing argument 'CONFIG'"),
        (["trian"], "No such command 'trian'"),
        (["check", QUICKSTART, "--fast"], "No such option: --fast"),
        (["plot", "no-such-folder"], "run folder 'no-such-folder' does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_used_run_folder_is_refused_and_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    assert cli.run(["train", QUICKSTART, f"run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == f"error: run.dir: must be a new or empty folder, got '{tmp_path}'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("key", "name"),
    [("reward", "nopkg.mod:f"), ("data.source", "nopkg:f"), ("algorithm.advantage", "nopkg:f")],
)
def test_a_function_that_is_not_there_leaves_no_run_folder(
    key: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fails without `check_names`: the folder would be there, and the next try refused for it."""
    assert cli.run(["train", QUICKSTART, f"run.dir={tmp_path / 'run'}", f"{key}={name}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {key}: ") and repr(name) in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (FleetDegraded("no engine is left"), 1, "error: FleetDegraded: no engine is left\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_other_ways_to_end(
    error: BaseException,
    code: int,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(folder: Path) -> Path:
        raise error

    monkeypatch.setattr("miles.telemetry.plot.plot_run", fail)
    assert cli.run(["plot", "somewhere"]) == code
    assert capsys.readouterr().err == shown


def test_plot_prints_where_the_picture_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=4)
    assert cli.run(["plot", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'curves.png'}\n"
    assert (tmp_path / "run" / "curves.png").exists()


def test_main_exits_with_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("miles 0.")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "train" in capsys.readouterr().out


def test_a_checkpoint_of_somebodys_own_trainer_is_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fails when its files are taken for Megatron's: the error would be a traceback from deep inside."""
    config = load_config(QUICKSTART, {"trainer.backend": "mine.trainer:make"})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert cli.run(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert shown == "error: trainer.backend: only 'mine.trainer:make' itself can export what it saved\n"
