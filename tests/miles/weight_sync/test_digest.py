"""The digest: any legal cut adds up to the same number, and every kind of damage changes it."""

from __future__ import annotations

import itertools

import pytest
import torch

from miles.weight_sync.digest import add, combine, partial_sum
from miles.weight_sync.messages import Box
from miles.weight_sync.plan import whole

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return words.view(dtype)


def total(tensor: torch.Tensor, name: str = "w") -> int:
    return partial_sum(name, tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    return combine(
        {name: total(tensor, name) for name, tensor in tensors.items()},
        {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()},
    )


def boxes(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """Every box of the grid with these inner cut points per dimension."""
    per_dim = []
    for length, inner in zip(shape, cuts, strict=True):
        edges = [0, *inner, length]
        per_dim.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    return list(itertools.product(*per_dim))


def take(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[[], []], [[3], []], [[], [8, 24]], [[1, 5, 6], [16]], [[2], [8, 16, 24]]], ids=str)
def test_parts_of_any_row_and_column_cut_add_up(dtype: torch.dtype, cuts: list[list[int]]) -> None:
    tensor = random((7, 32), dtype)
    parts = [{"w": partial_sum("w", take(tensor, box), (7, 32), box)} for box in boxes((7, 32), cuts)]
    assert add(parts)["w"] == total(tensor)


def test_parts_of_a_three_dimensional_tensor_add_up() -> None:
    tensor = random((3, 5, 8))
    parts = [partial_sum("w", take(tensor, box), (3, 5, 8), box) for box in boxes((3, 5, 8), [[1], [2, 3], [4]])]
    assert sum(parts) % 2**64 == total(tensor)


@pytest.mark.parametrize("length", [1, 3, 5, 7, 33])
def test_a_last_dimension_that_is_no_multiple_of_eight_bytes_is_padded(length: int) -> None:
    tensor = random((6, length), torch.bfloat16)
    parts = [partial_sum("w", take(tensor, box), (6, length), box) for box in boxes((6, length), [[2], []])]
    assert sum(parts) % 2**64 == total(tensor)


def test_a_ragged_last_column_may_end_at_the_edge_of_the_tensor() -> None:
    tensor = random((6, 9), torch.bfloat16)
    parts = [partial_sum("w", take(tensor, box), (6, 9), box) for box in boxes((6, 9), [[], [4]])]
    assert sum(parts) % 2**64 == total(tensor)


def test_a_cut_inside_a_word_is_refused_by_name() -> None:
    tensor = random((4, 8), torch.bfloat16)
    with pytest.raises(ValueError, match=r"layers\.3\.w: the box .* cuts a row"):
        partial_sum("layers.3.w", tensor[:, 2:6], (4, 8), ((0, 4), (2, 4)))


def test_views_with_odd_strides_and_offsets_count_like_copies() -> None:
    fused = random((9, 10), torch.bfloat16)  # rows of 20 bytes: a row slice starts in the middle of a word
    part = fused[3:7]
    assert total(part) == total(part.clone())
    assert total(fused[:, :8].T) == total(fused[:, :8].T.contiguous())


def test_scalars_and_empty_tensors_have_sums() -> None:
    assert partial_sum("s", torch.tensor(3.0), (), ()) != partial_sum("s", torch.tensor(4.0), (), ())
    assert partial_sum("e", torch.zeros(0, 4), (0, 4), ((0, 0), (0, 4))) == 0


def test_large_tensors_are_summed_in_chunks() -> None:
    tensor = random((3000, 512))  # more words than a chunk holds
    halves = [partial_sum("w", tensor[a:b], (3000, 512), ((a, b - a), (0, 512))) for a, b in ((0, 1111), (1111, 3000))]
    assert sum(halves) % 2**64 == total(tensor)


@pytest.mark.parametrize("seed", range(3))
def test_every_single_flipped_bit_changes_the_sum(seed: int) -> None:
    """Fails if a weight is even (remove `| 1` in digest._weights)."""
    tensor = random((4, 8), torch.int8, seed)
    before = total(tensor)
    for bit in range(4 * 8 * 8):
        damaged = tensor.clone()
        damaged.view(-1)[bit // 8] ^= -128 if bit % 8 == 7 else 1 << (bit % 8)
        assert total(damaged) != before, bit


def test_swapped_rows_columns_and_transposition_change_the_sum() -> None:
    """Fails for a plain sum of words (drop `* columns` or `* rows` in digest.partial_sum)."""
    tensor = random((16, 16), torch.float64)
    before = total(tensor)
    for first, second in itertools.combinations(range(16), 2):
        order = list(range(16))
        order[first], order[second] = order[second], order[first]
        assert total(tensor[order]) != before
        assert total(tensor[:, order]) != before
    assert total(tensor.T) != before


def test_swapped_tensors_another_name_dtype_or_shape_change_the_digest() -> None:
    """Fails if the identity is left out of digest.combine."""
    a, b = random((8, 8), seed=1), random((8, 8), seed=2)
    digest = digest_of({"a": a, "b": b})
    assert digest == digest_of({"b": b, "a": a})  # the order does not matter
    assert digest != digest_of({"a": b, "b": a})
    assert digest != digest_of({"a": a, "c": b})
    assert digest != digest_of({"a": a, "b": b.view(torch.int32)})
    assert digest != digest_of({"a": a, "b": b.view(4, 16)})
    assert len(digest) == 16
    assert int(digest, 16) >= 0


def test_a_missing_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="b"):
        combine({"a": 1}, {"a": ("float32", (1,)), "b": ("float32", (1,))})
