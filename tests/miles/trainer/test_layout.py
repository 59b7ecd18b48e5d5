"""The table of boxes: complete, without overlap, exact in both directions, at any tensor parallelism."""

import dataclasses

import pytest
import torch
from torch import Tensor

from miles.trainer.layout import global_shapes, layout, slices
from miles.trainer.model import Architecture
from miles.trainer.shards import iter_shards
from miles.trainer.weights import copy_in, copy_out

QWEN = Architecture(
    model_type="qwen3",
    layers=2,
    hidden=24,
    heads=8,
    groups=4,
    head_dim=6,
    intermediate=20,
    vocab=37,
    max_positions=64,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    rope_theta=1e4,
)
BIASED = dataclasses.replace(QWEN, model_type="qwen2", qkv_bias=True, qk_norm=False, tied=True)
ARCHITECTURES = pytest.mark.parametrize("arch", [QWEN, BIASED], ids=["qwen3", "qwen2-tied"])


def hf_tensors(arch: Architecture) -> dict[str, Tensor]:
    """Every element of every tensor has a value of its own."""
    result, start = {}, 1
    for name, shape in global_shapes(arch).items():
        size = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + size, dtype=torch.float64).reshape(shape)
        start += size
    return result


def empty_parameters(arch: Architecture, rank: int, size: int) -> dict[str, Tensor]:
    """Parameters as large as the pieces of `layout` say; embeddings with their padding rows."""
    result = {}
    for name, pieces in layout(arch, rank, size).items():
        extent = [max(sum(piece.local[dim]) for piece in pieces) for dim in range(len(pieces[0].local))]
        if "embeddings" in name or "output_layer" in name:
            extent[0] = arch.padded_vocab(size) // size
        result[name] = torch.full(extent, float("nan"), dtype=torch.float64)
    return result


@ARCHITECTURES
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loading_then_exporting_is_exact(arch: Architecture, size: int) -> None:
    tensors = hf_tensors(arch)
    ranks = [empty_parameters(arch, rank, size) for rank in range(size)]
    for rank, parameters in enumerate(ranks):
        copy_in(parameters, tensors, arch, rank, size)
        assert not any(tensor.isnan().any() for tensor in parameters.values()), "a part was not filled"
    exported = copy_out(list(ranks), arch)
    assert set(exported) == set(tensors)
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)


@ARCHITECTURES
@pytest.mark.parametrize("size", [1, 2])
def test_boxes_of_all_ranks_make_up_the_global_tensors_once(arch: Architecture, size: int) -> None:
    tensors = hf_tensors(arch)
    seen = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    counts = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(size):
        parameters = empty_parameters(arch, rank, size)
        copy_in(parameters, tensors, arch, rank, size)
        for shard in iter_shards(parameters, arch, rank, size):
            assert tuple(shard.tensor.shape) == tuple(length for _, length in shard.box)
            assert shard.global_shape == tuple(tensors[shard.name].shape)
            seen[shard.name][slices(shard.box)] = shard.tensor
            counts[shard.name][slices(shard.box)] += 1
    for name in tensors:
        assert torch.equal(seen[name], tensors[name])
        replicas = size if "norm" in name else 1
        assert (counts[name] == replicas).all()


def test_the_query_rows_of_each_group_are_a_box_of_their_own() -> None:
    boxes = [p.box[0] for p in layout(QWEN)["decoder.layers.0.self_attention.linear_qkv.weight"] if "q_proj" in p.name]
    assert boxes == [(0, 12), (12, 12), (24, 12), (36, 12)]


def test_padding_rows_of_the_vocabulary_are_zero_and_in_no_box() -> None:
    parameters = empty_parameters(QWEN, 1, 2)
    copy_in(parameters, hf_tensors(QWEN), QWEN, 1, 2)
    embedding = parameters["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 19 and not embedding[18].any()
    assert layout(QWEN, 1, 2)["embedding.word_embeddings.weight"][0].box[0] == (19, 18)


def test_a_tensor_of_another_shape_is_refused() -> None:
    tensors = hf_tensors(QWEN)
    tensors["model.norm.weight"] = torch.zeros(25)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(25,\), config says \(24,\)"):
        copy_in(empty_parameters(QWEN, 0, 1), tensors, QWEN)


def test_groups_that_tensor_parallelism_cannot_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query groups"):
        layout(QWEN, 0, 3)
