"""Which part of which Hugging Face tensor lies where in a rank's fused Megatron parameters. Torch-free.

One table, read three ways: loading copies boxes in, exporting copies them out, `shards` hands them out as live views.
`linear_qkv` is interleaved per query group ([q of group, k, v] repeated), so q_proj is one box per group;
`linear_fc1` is gate, then up. TP cuts rows of embeddings, qkv and fc1, and columns of proj and fc2; PP cuts layers;
EP cuts experts. A tied embedding lies on the last pipeline stage too, as its output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miles.trainer.architecture import Architecture, check_sizes, layers_of_stage
from miles.trainer.parallel import ParallelSizes, Place

Box = tuple[tuple[int, int], ...]
Table = dict[str, list["Piece"]]

ALONE = Place()
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, and the box of the local parameter that holds it: (start, length) per dimension."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: Box


def layout(arch: Architecture, place: Place = ALONE) -> Table:
    """Megatron parameter name -> its pieces, for the rank at `place`. Raises ConfigError for sizes that do not fit."""
    check_sizes(arch, place.sizes)
    table: Table = {}
    if place.is_first_stage:
        table["embedding.word_embeddings.weight"] = _vocab(EMBEDDING, arch, place)
    for local, index in enumerate(layers_of_stage(arch.layers, place)):
        table |= _layer(f"decoder.layers.{local}.", f"model.layers.{index}.", arch, place)
    if place.is_last_stage:
        table["decoder.final_layernorm.weight"] = _whole("model.norm.weight", arch.hidden)
        if not arch.tied:
            table["output_layer.weight"] = _vocab("lm_head.weight", arch, place)
        elif not place.is_first_stage:
            table["output_layer.weight"] = _vocab(EMBEDDING, arch, place)
    return table


def global_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape; a tied head is not among them."""
    return {piece.name: piece.global_shape for pieces in layout(arch).values() for piece in pieces}


def owners(arch: Architecture, sizes: ParallelSizes) -> Mapping[str, list[tuple[int, str, Piece]]]:
    """Global tensor -> (rank, parameter, piece) that make it up, each element once; in checkpoint order."""
    found: dict[str, list[tuple[int, str, Piece]]] = {name: [] for name in global_shapes(arch)}
    taken: set[tuple[str, Box]] = set()
    for place in _distinct_places(sizes):
        for parameter, pieces in layout(arch, place).items():
            for piece in pieces:
                if (piece.name, piece.box) not in taken:
                    taken.add((piece.name, piece.box))
                    found[piece.name].append((place.rank, parameter, piece))
    return found


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index into a tensor."""
    return tuple(slice(start, start + length) for start, length in box)


def _distinct_places(sizes: ParallelSizes) -> Iterator[Place]:
    """One place of each set of ranks that hold the same parameters."""
    for rank in range(sizes.world_size):
        place = Place.of(rank, sizes)
        if place.context + sizes.context * place.data < sizes.expert:
            yield place


def _layer(mcore: str, hf: str, arch: Architecture, place: Place) -> Table:
    attention = f"{mcore}self_attention."
    table = {
        f"{mcore}input_layernorm.weight": _whole(f"{hf}input_layernorm.weight", arch.hidden),
        f"{attention}linear_proj.weight": _columns(
            f"{hf}self_attn.o_proj.weight", arch.hidden, arch.heads * arch.head_dim, place
        ),
        f"{attention}linear_qkv.weight": _qkv(hf, "weight", (arch.hidden,), arch, place),
    }
    if arch.qkv_bias:
        table[f"{attention}linear_qkv.bias"] = _qkv(hf, "bias", (), arch, place)
    if arch.qk_norm:
        table[f"{attention}q_layernorm.weight"] = _whole(f"{hf}self_attn.q_norm.weight", arch.head_dim)
        table[f"{attention}k_layernorm.weight"] = _whole(f"{hf}self_attn.k_norm.weight", arch.head_dim)
    table[f"{mcore}pre_mlp_layernorm.weight"] = _whole(f"{hf}post_attention_layernorm.weight", arch.hidden)
    if arch.experts is None:
        return table | _mlp(f"{mcore}mlp.", f"{hf}mlp.", arch.intermediate, arch, place)
    table[f"{mcore}mlp.router.weight"] = _whole(f"{hf}mlp.gate.weight", arch.experts.count, arch.hidden)
    count = arch.experts.count // place.sizes.expert
    for local in range(count):
        expert = place.expert * count + local
        ours, theirs = f"{mcore}mlp.experts.local_experts.{local}.", f"{hf}mlp.experts.{expert}."
        table |= _mlp(ours, theirs, arch.experts.intermediate, arch, place)
    return table


def _mlp(mcore: str, hf: str, intermediate: int, arch: Architecture, place: Place) -> Table:
    rows = intermediate // place.sizes.tensor
    columns = (0, arch.hidden)
    gate_up = [
        Piece(
            f"{hf}{part}_proj.weight",
            (intermediate, arch.hidden),
            ((place.tensor * rows, rows), columns),
            ((index * rows, rows), columns),
        )
        for index, part in enumerate(("gate", "up"))
    ]
    return {
        f"{mcore}linear_fc1.weight": gate_up,
        f"{mcore}linear_fc2.weight": _columns(f"{hf}down_proj.weight", arch.hidden, intermediate, place),
    }


def _qkv(prefix: str, kind: str, tail: tuple[int, ...], arch: Architecture, place: Place) -> list[Piece]:
    groups = arch.groups // place.sizes.tensor
    rest = tuple((0, extent) for extent in tail)
    query_rows = arch.heads // arch.groups * arch.head_dim
    pieces = []
    row = 0
    for group in range(place.tensor * groups, (place.tensor + 1) * groups):
        for part, rows in (("q", query_rows), ("k", arch.head_dim), ("v", arch.head_dim)):
            name = f"{prefix}self_attn.{part}_proj.{kind}"
            box = ((group * rows, rows), *rest)
            pieces.append(Piece(name, (arch.groups * rows, *tail), box, ((row, rows), *rest)))
            row += rows
    return pieces


def _vocab(name: str, arch: Architecture, place: Place) -> list[Piece]:
    """Embedding rows of this rank; padding rows belong to no global tensor."""
    rows = arch.padded_vocab(place.sizes.tensor) // place.sizes.tensor
    start = min(place.tensor * rows, arch.vocab)
    count = min(rows, arch.vocab - start)
    if not count:
        return []
    columns = (0, arch.hidden)
    return [Piece(name, (arch.vocab, arch.hidden), ((start, count), columns), ((0, count), columns))]


def _columns(name: str, rows: int, columns: int, place: Place) -> list[Piece]:
    width = columns // place.sizes.tensor
    return [Piece(name, (rows, columns), ((0, rows), (place.tensor * width, width)), ((0, rows), (0, width)))]


def _whole(name: str, *shape: int) -> list[Piece]:
    box = tuple((0, size) for size in shape)
    return [Piece(name, shape, box, box)]
