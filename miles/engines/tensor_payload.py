"""How `/update_weights_from_tensor` takes its one tensor, the manifest of a custom weight loader.

SGLang unpickles it (base64 of a list of named tensors). A server whose `/server_info` says
`"tensor_encoding": "safetensors"` takes base64 of safetensors bytes and unpickles nothing.
"""

from __future__ import annotations

import base64
import pickle

import numpy as np
from safetensors.numpy import save

MANIFEST = "manifest"


def encode_manifest(manifest: bytes, encoding: str | None) -> str:
    """One uint8 tensor named `manifest` as the server wants it. `encoding` is None for SGLang's own."""
    if encoding == "safetensors":
        return base64.b64encode(save({MANIFEST: np.frombuffer(manifest, np.uint8)})).decode()
    import torch  # only SGLang's encoding needs it

    # Plain pickling puts the bytes inline. SGLang's own serializer shares memory with the receiver instead, which a
    # receiver that is not a child of this process refuses, and dies of.
    tensor = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(MANIFEST, tensor)])).decode()
