"""The table of boxes: complete, without overlap, exact in both directions, whatever the sizes."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from controllers.errors import ConfigError
from miles.trainer.architecture import Architecture, Experts, layers_of_stage
from miles.trainer.layout import global_shapes, layout, slices
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.shards import iter_shards
from miles.trainer.weights import global_tensors
from tests.miles.trainer.whole_tensors import copy_in, copy_out

QWEN = Architecture(
    model_type="qwen3",
    layers=3,
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
BIASED = dataclasses.replace(QWEN, model_type="qwen2", qkv_bias=True, qk_norm=False)
MIXTURE = dataclasses.replace(QWEN, model_type="qwen3_moe", experts=Experts(4, 2, 12, normalised=True))
KINDS = {"qwen3": QWEN, "qwen2": BIASED, "qwen3_moe": MIXTURE}
CASES = [
    pytest.param(
        dataclasses.replace(arch, tied=tied),
        ParallelSizes(tensor=tensor, pipeline=pipeline, data=2, expert=expert, sequence=tensor > 1),
        id=f"{name}-{'tied' if tied else 'untied'}-tp{tensor}-pp{pipeline}-ep{expert}",
    )
    for (name, arch), tied, tensor, pipeline, expert in itertools.product(
        KINDS.items(), (True, False), (1, 2, 4), (1, 2), (1, 2)
    )
    if arch.experts is not None or expert == 1
]


def places(sizes: ParallelSizes) -> list[Place]:
    return [Place.of(rank, sizes) for rank in range(sizes.world_size)]


def hf_tensors(arch: Architecture) -> dict[str, Tensor]:
    """Every element of every tensor has a value of its own."""
    result, start = {}, 1
    for name, shape in global_shapes(arch).items():
        size = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + size, dtype=torch.float64).reshape(shape)
        start += size
    return result


def empty_parameters(arch: Architecture, place: Place) -> dict[str, Tensor]:
    """Parameters as large as the pieces of `layout` say; embeddings with their padding rows."""
    result = {}
    for name, pieces in layout(arch, place).items():
        extent = [max(sum(piece.local[dim]) for piece in pieces) for dim in range(len(pieces[0].local))]
        if "embeddings" in name or "output_layer" in name:
            extent[0] = arch.padded_vocab(place.sizes.tensor) // place.sizes.tensor
        result[name] = torch.full(extent, float("nan"), dtype=torch.float64)
    return result


@pytest.mark.parametrize(("arch", "sizes"), CASES)
def test_boxes_tile_every_tensor_and_loading_then_exporting_is_exact(arch: Architecture, sizes: ParallelSizes) -> None:
    """Every element lies in one box of each set of ranks that share a model, and as often as there are replicas."""
    tensors = hf_tensors(arch)
    counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    ranks = [empty_parameters(arch, place) for place in places(sizes)]
    for place, parameters in zip(places(sizes), ranks, strict=True):
        copy_in(parameters, tensors, arch, place)
        assert not any(tensor.isnan().any() for tensor in parameters.values()), "a part was not filled"
        for shard in iter_shards(parameters, arch, place):
            assert tuple(shard.tensor.shape) == tuple(length for _, length in shard.box)
            assert shard.global_shape == tuple(tensors[shard.name].shape)
            assert torch.equal(shard.tensor, tensors[shard.name][slices(shard.box)])
            counts[shard.name][slices(shard.box)] += 1
    for name in tensors:
        assert (counts[name] == replicas(name, arch, sizes)).all(), name
    exported = copy_out(ranks, arch, sizes)
    assert list(exported) == list(tensors)
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)


def replicas(name: str, arch: Architecture, sizes: ParallelSizes) -> int:
    """Ranks that hold the same element."""
    if ".experts." in name:
        return sizes.data // sizes.expert
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return sizes.data * sizes.tensor
    on_both_ends = arch.tied and sizes.pipeline > 1 and name == "model.embed_tokens.weight"
    return sizes.data * (2 if on_both_ends else 1)


def test_shards_are_views_of_the_parameters() -> None:
    parameters = empty_parameters(QWEN, Place())
    for shard in iter_shards(parameters, QWEN):
        shard.tensor.fill_(1.0)
    assert all((tensor == 1.0).all() for tensor in parameters.values())


def test_one_rank_gathers_without_a_process_group() -> None:
    tensors = hf_tensors(QWEN)
    parameters = empty_parameters(QWEN, Place())
    copy_in(parameters, tensors, QWEN)
    gathered = dict(global_tensors(parameters, QWEN))
    assert list(gathered) == list(tensors)
    assert all(torch.equal(gathered[name], tensors[name]) for name in tensors)


def test_the_query_rows_of_each_group_are_a_box_of_their_own() -> None:
    boxes = [p.box[0] for p in layout(QWEN)["decoder.layers.0.self_attention.linear_qkv.weight"] if "q_proj" in p.name]
    assert boxes == [(0, 12), (12, 12), (24, 12), (36, 12)]


def test_padding_rows_of_the_vocabulary_are_zero_and_in_no_box() -> None:
    place = Place(ParallelSizes(tensor=2), tensor=1)
    parameters = empty_parameters(QWEN, place)
    copy_in(parameters, hf_tensors(QWEN), QWEN, place)
    embedding = parameters["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 19 and not embedding[18].any()
    assert layout(QWEN, place)["embedding.word_embeddings.weight"][0].box[0] == (19, 18)
    tiny = dataclasses.replace(QWEN, vocab=5)
    last = Place(ParallelSizes(tensor=4), tensor=3)
    assert layout(tiny, last)["embedding.word_embeddings.weight"] == [], "a rank of padding alone"


def test_expert_ranks_hold_their_experts_under_local_names() -> None:
    place = Place(ParallelSizes(data=2, expert=2), data=1)
    names = {piece.name for pieces in layout(MIXTURE, place).values() for piece in pieces if ".experts." in piece.name}
    assert {name.split(".experts.")[1].split(".")[0] for name in names} == {"2", "3"}
    first = layout(MIXTURE, place)["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"]
    assert first[0].name == "model.layers.0.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("layers", "stages", "shares"),
    [(4, 1, [4]), (4, 2, [2, 2]), (3, 2, [2, 1]), (6, 4, [1, 2, 2, 1]), (7, 4, [2, 2, 2, 1]), (5, 5, [1] * 5)],
)
def test_layers_left_over_go_to_stages_without_embeddings_first(layers: int, stages: int, shares: list[int]) -> None:
    sizes = ParallelSizes(pipeline=stages)
    ranges = [layers_of_stage(layers, Place(sizes, pipeline=stage)) for stage in range(stages)]
    assert [len(part) for part in ranges] == shares
    assert [layer for part in ranges for layer in part] == list(range(layers))


@pytest.mark.parametrize(
    ("arch", "sizes", "message"),
    [
        (QWEN, ParallelSizes(tensor=8), "trainer.tensor_parallel: 8 ranks cannot share 4 key/value heads"),
        (QWEN, ParallelSizes(pipeline=4), "trainer.pipeline_parallel: 4 ranks cannot share 3 layers"),
        (QWEN, ParallelSizes(data=2, expert=2), "trainer.expert_parallel: the model has no experts to share"),
        (MIXTURE, ParallelSizes(data=3, expert=3), "trainer.expert_parallel: 3 ranks cannot share 4 experts"),
        (MIXTURE, ParallelSizes(tensor=2), "trainer.sequence_parallel: tensor parallelism over a mixture of experts"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(arch: Architecture, sizes: ParallelSizes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(arch, Place(sizes))
    assert caught.value.message.startswith(message)
    assert caught.value.key == message.partition(":")[0]


def test_parameters_that_the_table_does_not_know_are_refused() -> None:
    parameters = empty_parameters(QWEN, Place()) | {"decoder.extra": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"without a place in the checkpoint: \['decoder\.extra'\]"):
        copy_in(parameters, hf_tensors(QWEN), QWEN)
