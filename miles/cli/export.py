"""`miles export`: a Hugging Face folder out of a run's checkpoint, in this process alone, without Ray and engines.

Works on a run that is going on, was stopped or was killed. Everything that can be refused is refused before the heavy
imports.
"""

from __future__ import annotations

from pathlib import Path

from controllers.errors import ConfigError
from miles.checkpoints import FOLDER, checkpoint_folder
from miles.cluster.signals import interruptible
from miles.config import load_config
from miles.telemetry.run_folder import CONFIG_FILE, MODEL_FOLDER
from miles.trainer.folders import refuse_occupied
from miles.trainer.registry import MEGATRON


def export_command(run_dir: Path, out: Path, step: int | None) -> Path:
    """Export the checkpoint of `step`, by default the newest, and return `out`.

    Raises ConfigError for what is no run folder, a step without a checkpoint, or an `out` with something in it.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{str(run_dir)!r} is no run folder: it has no {CONFIG_FILE}", path=str(run_dir))
    config = load_config(run_dir / CONFIG_FILE, machine=False)
    if (backend := config.trainer.backend) != MEGATRON:
        raise ConfigError(f"trainer.backend: only {backend!r} itself can export what it saved", key="trainer.backend")
    checkpoint = checkpoint_folder(run_dir / FOLDER, step)
    model = config.model.path or run_dir / MODEL_FOLDER
    if not (model / "config.json").is_file():
        raise ConfigError(f"the run's model folder {str(model)!r} holds no config.json", path=str(model))
    refuse_occupied(out)
    with interruptible():
        from miles.trainer.cpu_compat import import_megatron

        import_megatron()
        from miles.trainer.export import export_checkpoint

        export_checkpoint(checkpoint, model, out, dtype=config.trainer.dtype)
    return out
