"""Which part of which Hugging Face tensor lies where in this rank's fused Megatron parameters.

One table, read three ways: loading copies boxes in, exporting copies them out, `shards` hands them out as live views.
`linear_qkv` is interleaved per query group ([q of group, k, v] repeated), so q_proj is one box per group;
`linear_fc1` is gate, then up. TP cuts rows of embeddings, qkv and fc1, and columns of proj and fc2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles.trainer.model import Architecture

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, and the box of the local parameter that holds it: (start, length) per dimension."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: Box


def _whole(name: str, *shape: int) -> list[Piece]:
    box = tuple((0, size) for size in shape)
    return [Piece(name, shape, box, box)]


def _vocab(name: str, arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Embedding rows of this rank; padding rows belong to no global tensor."""
    rows = arch.padded_vocab(size) // size
    start = rank * rows
    count = min(rows, arch.vocab - start)
    columns = (0, arch.hidden)
    return [Piece(name, (arch.vocab, arch.hidden), ((start, count), columns), ((0, count), columns))]


def _qkv(prefix: str, kind: str, tail: tuple[int, ...], arch: Architecture, rank: int, size: int) -> list[Piece]:
    if arch.groups % size:
        raise ValueError(f"{arch.groups} query groups cannot be cut over {size} tensor-parallel ranks")
    groups = arch.groups // size
    rest = tuple((0, extent) for extent in tail)
    query_rows = arch.heads // arch.groups * arch.head_dim
    pieces = []
    for local_group in range(groups):
        group = rank * groups + local_group
        row = local_group * (query_rows + 2 * arch.head_dim)
        for part, rows in (("q", query_rows), ("k", arch.head_dim), ("v", arch.head_dim)):
            name = f"{prefix}self_attn.{part}_proj.{kind}"
            box = ((group * rows, rows), *rest)
            pieces.append(Piece(name, (arch.groups * rows, *tail), box, ((row, rows), *rest)))
            row += rows
    return pieces


def _gate_up(prefix: str, arch: Architecture, rank: int, size: int) -> list[Piece]:
    rows = arch.intermediate // size
    columns = (0, arch.hidden)
    return [
        Piece(
            f"{prefix}mlp.{part}_proj.weight",
            (arch.intermediate, arch.hidden),
            ((rank * rows, rows), columns),
            ((index * rows, rows), columns),
        )
        for index, part in enumerate(("gate", "up"))
    ]


def _columns(name: str, rows: int, columns: int, rank: int, size: int) -> list[Piece]:
    width = columns // size
    return [Piece(name, (rows, columns), ((0, rows), (rank * width, width)), ((0, rows), (0, width)))]


def layout(arch: Architecture, rank: int = 0, size: int = 1) -> dict[str, list[Piece]]:
    """Megatron parameter name -> its pieces, for TP rank `rank` of `size`."""
    table = {"embedding.word_embeddings.weight": _vocab("model.embed_tokens.weight", arch, rank, size)}
    for index in range(arch.layers):
        hf, mcore = f"model.layers.{index}.", f"decoder.layers.{index}."
        attention = f"{mcore}self_attention."
        table[f"{mcore}input_layernorm.weight"] = _whole(f"{hf}input_layernorm.weight", arch.hidden)
        table[f"{attention}linear_proj.weight"] = _columns(
            f"{hf}self_attn.o_proj.weight", arch.hidden, arch.heads * arch.head_dim, rank, size
        )
        table[f"{attention}linear_qkv.weight"] = _qkv(hf, "weight", (arch.hidden,), arch, rank, size)
        if arch.qkv_bias:
            table[f"{attention}linear_qkv.bias"] = _qkv(hf, "bias", (), arch, rank, size)
        if arch.qk_norm:
            table[f"{attention}q_layernorm.weight"] = _whole(f"{hf}self_attn.q_norm.weight", arch.head_dim)
            table[f"{attention}k_layernorm.weight"] = _whole(f"{hf}self_attn.k_norm.weight", arch.head_dim)
        table[f"{mcore}pre_mlp_layernorm.weight"] = _whole(f"{hf}post_attention_layernorm.weight", arch.hidden)
        table[f"{mcore}mlp.linear_fc1.weight"] = _gate_up(hf, arch, rank, size)
        table[f"{mcore}mlp.linear_fc2.weight"] = _columns(
            f"{hf}mlp.down_proj.weight", arch.hidden, arch.intermediate, rank, size
        )
    table["decoder.final_layernorm.weight"] = _whole("model.norm.weight", arch.hidden)
    if not arch.tied:
        table["output_layer.weight"] = _vocab("lm_head.weight", arch, rank, size)
    return table


def global_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape; a tied head is not among them."""
    return {piece.name: piece.global_shape for piece in _all_pieces(arch)}


def _all_pieces(arch: Architecture) -> Iterator[Piece]:
    for pieces in layout(arch).values():
        yield from pieces


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index into a tensor."""
    return tuple(slice(start, start + length) for start, length in box)
