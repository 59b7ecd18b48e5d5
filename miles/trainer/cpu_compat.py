"""The only place that works around what megatron-core assumes about its machine.

`import_megatron` must run before any other module imports megatron: it silences the warnings that megatron raises
about itself and checks the version.

Patches are process-wide, last for one call and exist only without a GPU. One thread alone, that of the rank's calls,
puts them on and takes them off. The thread that writes a checkpoint meanwhile meets none of them: it writes copies in
host memory and talks over gloo, which needs no device and none of Megatron's layers, collectives and schedules.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from controllers.errors import ConfigError

SUPPORTED_VERSION = "0.16."


def import_megatron() -> None:
    """Import megatron-core quietly. Raises ConfigError for a version whose internals were not checked."""
    version = importlib.metadata.version("megatron-core")
    if not version.startswith(SUPPORTED_VERSION):
        raise ConfigError(f"megatron-core {version} is installed; Miles was checked with {SUPPORTED_VERSION}x")
    # torch.distributed: Megatron's checkpoints rest on a class that torch deprecates.
    warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed)\b")
    with warnings.catch_warnings(), _without_compiler():
        warnings.simplefilter("ignore")
        for module in ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "optimizer", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{module}")


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Make `torch.compile` decorations plain on CPU: they load the inductor (seconds) and would run a C++ compiler."""
    import torch

    def plain(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else lambda wrapped: wrapped

    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(torch, "compile", plain):
        yield


@contextmanager
def building_on_cpu(dispatcher: type[Any]) -> Iterator[None]:
    """Let a model be built without a GPU, with `dispatcher` in place of Megatron's all-to-all one.

    The last pipeline stage moves its copy of a tied embedding to a GPU; a dispatcher makes a CUDA stream.
    """
    import torch
    from megatron.core.transformer.moe import moe_layer

    with (
        mock.patch.object(torch.Tensor, "cuda", lambda self, *_args, **_kwargs: self),
        # Any object will do: only a dispatcher that finds none makes a stream.
        mock.patch.object(moe_layer.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object()),
        mock.patch.object(moe_layer, "MoEAlltoAllTokenDispatcher", dispatcher),
    ):
        yield


@contextmanager
def running_on_cpu() -> Iterator[None]:
    """Let Megatron's layers, gradient buffers and schedules run without a GPU; with one, change nothing.

    They make tensors on the current GPU, wait for it, and enter its random state where they would drop out (at rate 0).
    """
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from miles.trainer import uneven_collectives

    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize", lambda *_args, **_kwargs: None),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_args, **_kwargs: nullcontext()),
        mock.patch.object(schedules, "torch", _TorchOnCpu()),
        mock.patch.object(mappings, "_gather_along_first_dim", uneven_collectives.gather_along_first_dim),
        mock.patch.object(
            mappings, "_reduce_scatter_along_first_dim", uneven_collectives.reduce_scatter_along_first_dim
        ),
    ):
        yield


class _TorchOnCpu:
    """torch, for a module that asks for zeros on `cuda`."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: str, **options: Any) -> Any:
        import torch

        return torch.zeros(*size, **options)
