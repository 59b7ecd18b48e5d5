"""A custom weight loader that writes what it was given to the file named in its manifest, and changes no weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PATH = "tests.support.recording_loader.record"


def record(model: object, named_tensors: list[tuple[str, Tensor]]) -> None:
    """The manifest is `<file>\\0<anything>`; the file gets the manifest appended as a line of hex digits."""
    [(name, tensor)] = named_tensors
    assert name == "manifest"
    manifest = bytes(tensor.tolist())
    with open(Path(manifest.partition(b"\0")[0].decode()), "a") as file:
        file.write(manifest.hex() + "\n")
