"""The commands, and the one place where an error becomes a line on standard error and an exit code.

Nothing heavy is imported before a command needs it: `miles --help` and `miles check` load neither torch nor ray.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from controllers.errors import ConfigError, MilesError

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="miles",
    help="Train language models with reinforcement learning on a fleet of engines that may come and go.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's, such as train.steps=50."),
]
RunDirArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Errors are printed here, in one line each, without a traceback."""
    try:
        code = app(arguments or ["--help"], prog_name="miles", standalone_mode=False)
    except ConfigError as error:
        return _report(str(error), EXIT_BAD_INPUT)
    except MilesError as error:
        return _report(f"{type(error).__name__}: {error}", EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except typer.TyperException as error:
        return _report(error.format_message(), EXIT_BAD_INPUT)
    return code if isinstance(code, int) else EXIT_DONE


def _report(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"miles {version('miles-rl')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that ended early.")] = False,
) -> int:
    """Train a model as a YAML file says."""
    from miles.cli.training import train_command

    return train_command(config, overrides or [], resume=resume)


@app.command()
def check(config: ConfigArgument, overrides: OverridesArgument = None) -> int:
    """Check a YAML file and print it with every key and its value."""
    from miles.config import dump_config, load_config

    print(dump_config(load_config(config, overrides or [])), end="")
    return EXIT_DONE


@app.command()
def export(
    run_dir: RunDirArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; absent or empty.")],
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint of this step; by default the newest.")] = None,
) -> int:
    """Write a checkpoint of a run as a Hugging Face model folder."""
    from miles.cli.export import export_command

    print(export_command(run_dir, out, step))
    return EXIT_DONE


@app.command()
def plot(run_dir: RunDirArgument) -> int:
    """Draw curves.png into a run folder, at any time."""
    from miles.telemetry.plot import plot_run

    print(plot_run(run_dir))
    return EXIT_DONE
