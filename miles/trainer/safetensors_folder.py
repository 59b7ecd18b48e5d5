"""Hugging Face folders of safetensors files: boxes read from them, tensors written to them one file at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from controllers.errors import ConfigError
from miles.models.folder import INDEX, ONE_FILE, weight_files
from miles.trainer.folders import new_folder
from miles.trainer.layout import Box

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
MAX_FILE_BYTES = 5_000_000_000

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class FolderReader:
    """Reads boxes of the tensors in a folder. A context manager; raises ConfigError for a folder without weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files_of_tensors(folder)
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """The content of a box. Raises ConfigError for a missing tensor, or one of another shape."""
        if name in self._files:
            return self._read(name, shape, box)
        if (match := _EXPERT.fullmatch(name)) is not None:
            return self._read_fused_expert(match, shape, box)
        raise self._missing(name)

    def _read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        if name not in self._files:
            raise self._missing(name)
        stored = self._open(self._files[name]).get_slice(name)
        if tuple(stored.get_shape()) != shape:
            problem = f"{name} has shape {tuple(stored.get_shape())}, config.json says {shape}"
            raise ConfigError(f"model.path: {str(self._folder)!r}: {problem}", key="model.path")
        content: Tensor = stored[tuple(slice(start, start + length) for start, length in box)]
        return content

    def _read_fused_expert(self, match: re.Match[str], shape: tuple[int, ...], box: Box) -> Tensor:
        """From the form that transformers 5 has in memory: [experts, ...], with gate and up in one tensor."""
        prefix, expert, part = match[1], int(match[2]), match[3]
        fused = f"{prefix}.down_proj" if part == "down" else f"{prefix}.gate_up_proj"
        if fused not in self._files:
            raise self._missing(match[0])
        count = self._open(self._files[fused]).get_slice(fused).get_shape()[0]
        rows, columns = shape
        if part == "up":
            box = ((rows + box[0][0], box[0][1]), box[1])
        whole = (count, rows if part == "down" else 2 * rows, columns)
        return self._read(fused, whole, ((expert, 1), *box))[0]

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(str(self._folder / file), framework="pt"))
        return self._opened[file]

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"model.path: {str(self._folder)!r} lacks the tensor {name!r}", key="model.path")


def _files_of_tensors(folder: Path) -> Mapping[str, str]:
    """Tensor -> its file."""
    found = {}
    for file in weight_files(folder):
        with safe_open(str(folder / file), framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def write_folder(
    tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors as they come, in files of at most `max_file_bytes` (or of one larger tensor).

    Config and tokenizer files are those of `source`. Raises ConfigError when `target` exists and is not empty; it is
    whole or absent.
    """
    with new_folder(target) as folder:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        files: list[list[str]] = []
        held: dict[str, Tensor] = {}
        held_bytes = total = 0
        dtype = ""
        for name, tensor in tensors:
            if held and held_bytes + tensor.nbytes > max_file_bytes:
                files.append(_write_part(folder, len(files), held))
                held, held_bytes = {}, 0
            held[name] = tensor.contiguous()
            held_bytes += tensor.nbytes
            total += tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
        files.append(_write_part(folder, len(files), held))
        _name_parts(folder, files, total)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def _part(index: int) -> str:
    return f"part-{index}.safetensors"


def _write_part(folder: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, folder / _part(index), metadata={"format": "pt"})
    return list(tensors)


def _name_parts(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Give the files the names that say how many they are, and write their index where there is more than one."""
    if len(files) == 1:
        (folder / _part(0)).rename(folder / ONE_FILE)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / _part(index)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
