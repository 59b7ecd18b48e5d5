"""Changing weights while the engine lives: the session, custom loaders, loading from disk, labels, checksums.

Every write happens on the scheduler thread between two steps, and everything that can be refused is refused before
the first write. A custom loader that raises ends the process, as in SGLang. No pickle is read: tensors come as
safetensors. Methods are called on the event loop, by `server`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load
from torch import Tensor

from controllers.errors import ConfigError
from miles.engines.embedded.checkpoint import check_weights, read_checkpoint, summary
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.request import RequestRefused
from miles.engines.embedded.scheduler import Scheduler

WeightLoader = Callable[[Decoder, list[tuple[str, Tensor]]], object]


def import_loaders(paths: Sequence[str]) -> dict[str, WeightLoader]:
    """Import custom weight loaders by dotted path. Raises ConfigError naming the one that cannot be had."""
    loaders: dict[str, WeightLoader] = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            loaders[path] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--custom-weight-loader {path!r}: {error}") from error
    return loaders


class WeightUpdater:
    """The weights API of one engine."""

    def __init__(self, scheduler: Scheduler, loaders: Mapping[str, WeightLoader]) -> None:
        self._scheduler = scheduler
        self._loaders = loaders
        self._open = False

    def begin(self) -> None:
        """Open a session. Raises RequestRefused while one is open."""
        if self._open:
            raise RequestRefused("a weight-update session is open already; call end_weight_update first")
        self._open = True

    def end(self) -> None:
        """Close the session. Raises RequestRefused when none is open."""
        if not self._open:
            raise RequestRefused("no weight-update session is open; call begin_weight_update first")
        self._open = False

    async def from_tensors(
        self, payloads: object, load_format: str | None, *, flush_cache: bool, version: str | None
    ) -> None:
        """Hand the tensors to the custom loader that `load_format` names; None loads them by name.

        `payloads` is a list with one base64 string per tensor-parallel rank, each a safetensors file.
        """
        if not self._open:
            raise RequestRefused("update_weights_from_tensor belongs between begin_weight_update and end_weight_update")
        if load_format is not None and load_format not in self._loaders:
            known = ", ".join(self._loaders) or "none"
            raise RequestRefused(f"load_format={load_format!r} is not a --custom-weight-loader of this engine: {known}")
        tensors = _decode_tensors(payloads)
        if load_format is None:
            await self._load(tensors, whole=False, flush_cache=flush_cache, version=version)
            return
        loader = self._loaders[load_format]
        model = self._scheduler.model
        await self._apply(lambda: loader(model, list(tensors.items())), flush_cache, version)

    async def from_disk(self, folder: Path, *, flush_cache: bool, version: str | None) -> None:
        """Load all weights from a Hugging Face folder; reading it does not stop generation."""
        try:
            weights = await asyncio.to_thread(read_checkpoint, folder)
        except ConfigError as error:
            raise RequestRefused(str(error)) from error
        await self._load(weights, whole=True, flush_cache=flush_cache, version=version)

    async def checksum(self) -> dict[str, Any]:
        """SHA-256 of every parameter, in SGLang's shape of the answer."""
        checksums = await self._scheduler.call(self._checksums)
        together = hashlib.sha256("".join(f"{name}{value}" for name, value in checksums.items()).encode()).hexdigest()
        place = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {
            "checksums": checksums,
            "per_gpu_checksum": together,
            "parallelism_info": [{"role": "target", **place, **sizes}],
        }
        return {"success": True, "message": "ok", "ranks": [rank], "per_engine_checksum": together}

    async def _load(
        self, weights: dict[str, Tensor], *, whole: bool, flush_cache: bool, version: str | None
    ) -> None:
        model = self._scheduler.model
        problems = check_weights(model, weights)
        if not whole:
            problems = [problem for problem in problems if not problem.endswith("in part")]
        if problems:
            raise RequestRefused(f"weights refused, nothing was written: {summary(problems)}")
        await self._apply(lambda: model.load_weights(weights.items()), flush_cache, version)

    async def _apply(self, write: Callable[[], object], flush_cache: bool, version: str | None) -> None:
        scheduler = self._scheduler

        def command() -> None:
            if flush_cache:
                scheduler.check_can_flush()
            # A loader may keep tensors it makes here for a thread of its own: no inference-mode tensors for it.
            with torch.inference_mode(False), torch.no_grad():
                write()
            if flush_cache:
                scheduler.flush_prefixes()
            if version is not None:
                scheduler.weight_version = version

        await scheduler.call(command)

    def _checksums(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(parameter.contiguous().view(torch.uint8).numpy().data).hexdigest()
            for name, parameter in self._scheduler.model.named_parameters()
        }


def _decode_tensors(payloads: object) -> dict[str, Tensor]:
    if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
        raise RequestRefused("serialized_named_tensors must be a list of one base64 string (one tensor-parallel rank)")
    try:
        return load(base64.b64decode(payloads[0], validate=True))
    except (binascii.Error, safetensors.SafetensorError) as error:
        raise RequestRefused(f"serialized_named_tensors is not base64 of a safetensors file: {error}") from error
