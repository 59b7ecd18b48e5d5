from __future__ import annotations

import base64
import pickle
from pathlib import Path

from safetensors.numpy import load

from miles.engines.commands import EmbeddedCommand, flags
from miles.engines.tensor_payload import encode_manifest


def test_flags_of_every_kind_of_value() -> None:
    values = {"max_tokens": 5, "verbose": True, "quiet": False, "name": None, "loaders": ["a.b", "c.d"], "lr": 0.5}
    assert flags(values) == ("--max-tokens", "5", "--verbose", "--loaders", "a.b", "c.d", "--lr", "0.5")


def test_the_embedded_engine_starts_with_dummy_weights_and_its_label() -> None:
    command = EmbeddedCommand(Path("/m"), "e.1:none", 8, 3, "pkg.loader", {"stream_interval": 4, "random_seed": 9})
    argv = command.argv("127.0.0.1", 8000)
    assert argv[1:3] == ("-m", "miles.engines.embedded")
    words = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert words == {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--weight-version": "e.1:none",
        "--load-format": "dummy",
        "--max-running-requests": "8",
        "--random-seed": "9",
        "--custom-weight-loader": "pkg.loader",
        "--stream-interval": "4",
    }


def test_a_manifest_survives_either_encoding() -> None:
    manifest = bytes(range(256)) * 3
    tensors = load(base64.b64decode(encode_manifest(manifest, "safetensors")))
    assert tensors["manifest"].tobytes() == manifest
    [(name, tensor)] = pickle.loads(base64.b64decode(encode_manifest(manifest, None)))
    assert (name, bytes(tensor.numpy())) == ("manifest", manifest)
