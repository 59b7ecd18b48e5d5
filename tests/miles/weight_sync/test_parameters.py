"""Binding global tensors to an engine's fused parameters: every element has a source, or the engine is refused."""

from __future__ import annotations

import math

import pytest
import torch

from miles.weight_sync.messages import Layout, make_layout
from miles.weight_sync.parameters import UnboundTensor, bind
from miles.weight_sync.plan import whole
from tests.miles.weight_sync.harness import EngineModel, same
from tests.miles.weight_sync.tensors import HIDDEN, SHAPES, VOCAB


def layout(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> Layout:
    return make_layout(0, 1, ((n, dtype, s, whole(s), 4 * math.prod(s)) for n, s in shapes.items()))


def test_fused_parameters_are_written_through_their_views() -> None:
    model = EngineModel()
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for view, tensor in zip(bind(model, layout(SHAPES)), weights.values(), strict=True):
        view.copy_(tensor)
    assert same(model, weights)
    qkv = dict(model.named_parameters())["model.layers.0.self_attn.qkv_proj.weight"]
    parts = [weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(qkv.detach(), torch.cat(parts))


def test_a_published_head_goes_to_the_tied_embedding() -> None:
    views = bind(EngineModel(), layout({**SHAPES, "lm_head.weight": (VOCAB, HIDDEN)}))
    assert views[-1].data_ptr() == views[0].data_ptr()


def test_an_alias_of_the_embedding_needs_no_weights_of_its_own() -> None:
    model = EngineModel()
    model.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    model.lm_head.weight = model.get_parameter("model.embed_tokens.weight")
    assert len(bind(model, layout(SHAPES))) == len(SHAPES)


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_parameter_without_weights_is_refused_by_name(missing: str) -> None:
    """Fails if the check of `covered` is dropped in parameters.bind (norm) or of siblings in `_view` (up_proj)."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != missing}
    with pytest.raises(UnboundTensor, match=missing.replace(".", r"\.")):
        bind(EngineModel(), layout(shapes))


def test_a_tensor_without_a_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnboundTensor, match=r"model\.extra\.weight"):
        bind(EngineModel(), layout({**SHAPES, "model.extra.weight": (4, 4)}))


def test_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(UnboundTensor, match=r"model\.norm\.weight"):
        bind(EngineModel(), layout({**SHAPES, "model.norm.weight": (HIDDEN + 2,)}))
    with pytest.raises(UnboundTensor, match="int32"):
        bind(EngineModel(), layout(SHAPES, "int32"))


def test_parts_that_do_not_fill_the_fused_parameter_are_refused() -> None:
    with pytest.raises(UnboundTensor, match="rows"):
        bind(EngineModel(), layout({**SHAPES, "model.layers.0.self_attn.k_proj.weight": (8, HIDDEN)}))
