"""The decoder against Hugging Face transformers, and its weights by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from controllers.errors import ConfigError
from miles.engines.embedded.attention import StepAttention
from miles.engines.embedded.checkpoint import check_weights, load_model_weights, read_checkpoint
from miles.engines.embedded.kv_cache import KvRows
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.model_config import read_model_config
from tests.miles.engines.embedded.in_process import CONTEXT, read_decoder
from tests.miles.engines.embedded.reference import Reference


@torch.inference_mode()
def _step(model: Decoder, cache: KvRows, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [rows, tokens, vocabulary] of one step."""
    length = int(positions.max()) + 1
    cache.reserve(length)
    hidden = model(tokens, positions, StepAttention(cache, positions, length))
    return model.logits(hidden).view(*tokens.shape, -1)


def _assert_equal_to_reference(folder: Path) -> None:
    model, reference = read_decoder(folder), Reference(folder)
    generator = torch.Generator().manual_seed(0)
    rows: Sequence[Tensor] = torch.randint(3, 250, (3, 80), generator=generator).unbind(0)
    expected = torch.stack([reference.logits(row.tolist()) for row in rows])
    tokens = torch.stack(list(rows))
    # Fewer positions than the sequence needs, so that the rows grow on the way; one row more than is used.
    cache = KvRows(model.config, torch.float32, rows=4, capacity=21)
    starts = torch.arange(80).expand(3, 80)
    got = [_step(model, cache, tokens[:, :12], starts[:, :12]), _step(model, cache, tokens[:, 12:20], starts[:, 12:20])]
    got += [_step(model, cache, tokens[:, i : i + 1], starts[:, i : i + 1]) for i in range(20, 80)]
    torch.testing.assert_close(torch.cat(got, 1), expected, atol=1e-4, rtol=0)


@pytest.mark.real
def test_equals_transformers_in_prefill_and_every_decode_step(model_folder: Path) -> None:
    _assert_equal_to_reference(model_folder)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Qwen3"])
def test_equals_transformers_for_each_architecture(kind: str, tmp_path: Path) -> None:
    """Untied, with biases (Qwen2), with another rope base; saved by transformers itself."""
    import transformers

    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if kind == "Qwen3":
        shape["head_dim"] = 24
    config = getattr(transformers, f"{kind}Config")(**shape)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    _assert_equal_to_reference(tmp_path)


@pytest.mark.real
def test_bfloat16_stays_close(model_folder: Path) -> None:
    model, reference = read_decoder(model_folder, torch.bfloat16), Reference(model_folder)
    tokens = torch.arange(5, 25).unsqueeze(0)
    cache = KvRows(model.config, torch.bfloat16, rows=1, capacity=32)
    got = _step(model, cache, tokens, torch.arange(20).unsqueeze(0))
    torch.testing.assert_close(got[0], reference.logits(tokens[0].tolist()), atol=0.05, rtol=0)


def test_padding_and_other_rows_do_not_matter(model_folder: Path) -> None:
    """Fails when the mask lets a query see beyond its own position."""
    model = read_decoder(model_folder)
    alone = KvRows(model.config, torch.float32, rows=1, capacity=64)
    together = KvRows(model.config, torch.float32, rows=2, capacity=64)
    together.data.fill_(1e4)
    short, long = torch.arange(10, 15), torch.arange(20, 32)
    padded = torch.stack((torch.cat((short, torch.zeros(7, dtype=torch.int64))), long))
    expected = _step(model, alone, short.unsqueeze(0), torch.arange(5).unsqueeze(0))
    got = _step(model, together, padded, torch.arange(12).expand(2, 12))
    torch.testing.assert_close(got[0, :5], expected[0], atol=1e-5, rtol=0)
    after = _step(model, alone, torch.tensor([[7]]), torch.tensor([[5]]))
    beside = _step(model, together, torch.tensor([[7], [8]]), torch.tensor([[5], [12]]))
    torch.testing.assert_close(beside[0], after[0], atol=1e-5, rtol=0)


def test_parameters_are_named_and_fused_as_in_sglang(model_folder: Path) -> None:
    names = {name: tuple(p.shape) for name, p in read_decoder(model_folder).named_parameters()}
    assert names["model.layers.1.self_attn.qkv_proj.weight"] == (4 * 32 + 2 * 2 * 32, 128)
    assert names["model.layers.0.mlp.gate_up_proj.weight"] == (512, 128)
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"} <= names.keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_load_weights_takes_hugging_face_names(model_folder: Path) -> None:
    source, target = read_decoder(model_folder), Decoder(read_model_config(model_folder), torch.float32, CONTEXT)
    target.initialize(seed=9)
    weights = read_checkpoint(model_folder)
    target.load_weights([*weights.items(), ("lm_head.weight", torch.zeros(1))])
    for (name, ours), (_, theirs) in zip(target.named_parameters(), source.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(KeyError, match=r"layers\.77"):
        target.load_weights([("model.layers.77.mlp.up_proj.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"k_proj.weight has shape \[1\]"):
        target.load_weights([("model.layers.0.self_attn.k_proj.weight", torch.zeros(1))])


def test_dummy_weights_depend_on_the_seed_alone(model_folder: Path) -> None:
    config = read_model_config(model_folder)
    models = [Decoder(config, torch.float32, CONTEXT) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.initialize(seed)
    first, second, other = (model.get_parameter("model.layers.0.mlp.down_proj.weight") for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_check_weights_finds_what_is_missing_wrong_or_unknown(model_folder: Path) -> None:
    model = read_decoder(model_folder)
    weights = read_checkpoint(model_folder)
    assert check_weights(model, weights) == []
    del weights["model.layers.0.self_attn.v_proj.weight"]
    weights["model.norm.weight"] = torch.zeros(7)
    weights["extra"] = torch.zeros(1)
    problems = " | ".join(check_weights(model, weights))
    assert "layers.0.self_attn.qkv_proj.weight is missing" in problems
    assert "model.norm.weight has shape [7]" in problems
    assert "extra is no tensor" in problems


def test_a_folder_without_weights_is_named(tmp_path: Path, model_folder: Path) -> None:
    model = read_decoder(model_folder)
    with pytest.raises(ConfigError, match="holds no weights"):
        load_model_weights(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot read"):
        load_model_weights(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'; supported: Qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(
    change: dict[str, object], message: str, tmp_path: Path, model_folder: Path
) -> None:
    values = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)
