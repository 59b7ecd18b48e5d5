"""Every architecture that is stated to be supported fits the trainer, the embedded engine and weight sync alike."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from miles.engines.embedded.model import Decoder
from miles.engines.embedded.model_config import read_model_config
from miles.models.architecture import ARCHITECTURES, unsupported
from miles.trainer.cpu_compat import import_megatron
from miles.weight_sync.messages import make_layout
from miles.weight_sync.parameters import bind
from miles.weight_sync.plan import whole

import_megatron()  # quietly; it warns, and warnings are errors here


@pytest.mark.filterwarnings("ignore::Warning:megatron", "ignore::Warning:torch.distributed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_trained_has_its_place_in_the_engine(architecture: str, tmp_path: Path) -> None:
    """Fails for an architecture that one of the three lacks, and where a bias has no place in a fused parameter."""
    from miles.trainer.layout import global_shapes
    from miles.trainer.model import read_architecture

    values = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": 30,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    assert unsupported(values) is None
    (tmp_path / "config.json").write_text(json.dumps(values))
    shapes = global_shapes(read_architecture(tmp_path))
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) is (architecture == "Qwen2ForCausalLM")
    layout = make_layout(0, 1, ((n, "float32", s, whole(s), 4 * math.prod(s)) for n, s in shapes.items()))
    model = Decoder(read_model_config(tmp_path), torch.float32, 32)
    assert len(bind(model, layout)) == len(shapes)
