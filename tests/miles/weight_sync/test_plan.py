"""Plans: whatever way source and target are cut, every byte arrives once and where it belongs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch

from miles.weight_sync import digest
from miles.weight_sync.arena import slot_views
from miles.weight_sync.messages import Box, Layout, make_layout
from miles.weight_sync.plan import PlanError, Region, full_layout, owners, plan_reads, subtract, tensors_of, whole
from tests.miles.weight_sync.harness import cut_rows_or_columns
from tests.miles.weight_sync.tensors import SHAPES


def layouts_of(world: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[Layout]:
    layouts = []
    for rank in range(world):
        cut = {name: cut_rows_or_columns(name, shape, rank, world) for name, shape in shapes.items()}
        layouts.append(layout_of(rank, cut, shapes))
    return layouts


def layout_of(rank: int, boxes: Mapping[str, Box], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    return make_layout(
        rank, 2, ((name, "float32", shapes[name], box, 4 * math.prod(n for _, n in box)) for name, box in boxes.items())
    )


def weights(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    start = itertools.count(1, 100_000)
    return {
        name: torch.arange(at, at + math.prod(shape), dtype=torch.float32).view(shape)
        for (name, shape), at in zip(shapes.items(), start, strict=False)
    }


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def filled(layout: Layout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    memory = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for entry, view in zip(layout.entries, slot_views(memory, layout), strict=True):
        view.copy_(box_of(tensors[entry.name], entry.box))
    return memory


def run(regions: tuple[Region, ...], sources: dict[int, torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(target memory, how often each byte was written)."""
    memory = torch.zeros(size, dtype=torch.uint8)
    writes = torch.zeros(size, dtype=torch.int32)
    for region in regions:
        part = sources[region.rank][region.source : region.source + region.nbytes]
        assert part.numel() == region.nbytes
        memory[region.target : region.target + region.nbytes] = part
        writes[region.target : region.target + region.nbytes] += 1
    return memory, writes


@pytest.mark.parametrize("source_world", [1, 2, 4])
@pytest.mark.parametrize("target_world", [1, 2, 4])
def test_every_sharding_reaches_every_other(source_world: int, target_world: int) -> None:
    tensors = weights()
    sources = layouts_of(source_world)
    memories = {layout.rank: filled(layout, tensors) for layout in sources}
    for target in layouts_of(target_world):
        memory, writes = run(plan_reads(sources, target), memories, target.slot_bytes)
        for entry, view in zip(target.entries, slot_views(memory, target), strict=True):
            assert torch.equal(view, box_of(tensors[entry.name], entry.box)), entry.name
            assert writes[entry.offset : entry.offset + entry.nbytes].eq(1).all(), entry.name
        assert writes.max() == 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_parts_add_up_to_the_digest_of_the_whole(world: int) -> None:
    """Fails if replicas count on every rank (return all entries from plan.owners)."""
    tensors = weights()
    layouts = layouts_of(world)
    parts = []
    for layout, owned in zip(layouts, owners(layouts), strict=True):
        for index in owned:
            entry = layout.entries[index]
            shard = box_of(tensors[entry.name], entry.box)
            parts.append({entry.name: digest.partial_sum(entry.name, shard, entry.global_shape, entry.box)})
    whole_sums = {
        name: digest.partial_sum(name, tensor, tuple(tensor.shape), whole(tuple(tensor.shape)))
        for name, tensor in tensors.items()
    }
    assert digest.combine(digest.add(parts), tensors_of(layouts)) == digest.combine(whole_sums, tensors_of(layouts))


def test_equal_layouts_are_one_read() -> None:
    [source] = layouts_of(1)
    target = full_layout([source])
    assert [(entry.name, entry.offset) for entry in target.entries] == [(e.name, e.offset) for e in source.entries]
    last = source.entries[-1]
    assert plan_reads([source], target) == (Region(0, 0, 0, last.offset + last.nbytes),)


def test_neighbours_inside_a_tensor_are_not_joined_across_a_gap() -> None:
    """A gap of less than the alignment may hold another rank's columns (drop `between` in plan._merge and it fails)."""
    shapes = {"w": (2, 128)}  # rows of 512 bytes
    left = layout_of(0, {"w": ((0, 2), (0, 96))}, shapes)
    right = layout_of(1, {"w": ((0, 2), (96, 32))}, shapes)
    both = full_layout([left, right])
    tensors = weights(shapes)
    memories = {0: filled(left, tensors), 1: filled(right, tensors)}
    memory, writes = run(plan_reads([left, right], both), memories, both.slot_bytes)
    assert torch.equal(slot_views(memory, both)[0], tensors["w"])
    assert writes.eq(1).all()


def test_replicas_are_read_once_and_targets_spread_over_them() -> None:
    shapes = {"norm": (64,)}
    sources = [layout_of(rank, {"norm": ((0, 64),)}, shapes) for rank in range(2)]
    readers = [layout_of(rank, {"norm": ((0, 64),)}, shapes) for rank in range(2)]
    assert [[region.rank for region in plan_reads(sources, reader)] for reader in readers] == [[0], [1]]


def test_what_nobody_holds_is_refused_by_name() -> None:
    shapes = {"w": (4, 4)}
    half = layout_of(0, {"w": ((0, 2), (0, 4))}, shapes)
    whole_layout = layout_of(0, {"w": ((0, 4), (0, 4))}, shapes)
    with pytest.raises(PlanError, match=r"w: no rank holds \(\(2, 2\), \(0, 4\)\)"):
        plan_reads([half], whole_layout)
    with pytest.raises(PlanError, match="w: no rank holds"):
        owners([half])


def test_boxes_that_overlap_in_part_are_refused_as_owners() -> None:
    shapes = {"w": (4, 4)}
    a = layout_of(0, {"w": ((0, 3), (0, 4))}, shapes)
    b = layout_of(1, {"w": ((2, 2), (0, 4))}, shapes)
    with pytest.raises(PlanError, match="overlaps another in part"):
        owners([a, b])


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    a = layout_of(0, {"w": ((0, 4), (0, 4))}, {"w": (4, 4)})
    b = layout_of(1, {"w": ((0, 4), (0, 8))}, {"w": (4, 8)})
    with pytest.raises(PlanError, match="w: rank 1"):
        tensors_of([a, b])


def test_a_box_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        make_layout(0, 2, [("w", "float32", (2,), ((0, 2),), 8)] * 2)


def test_subtract_leaves_disjoint_parts() -> None:
    box: Box = ((0, 4), (0, 4))
    cut: Box = ((1, 2), (1, 2))
    grid = torch.zeros(4, 4, dtype=torch.int32)
    for part in [*subtract(box, cut), cut]:
        box_of(grid, part).add_(1)
    assert grid.eq(1).all()


def test_layout_ids_tell_layouts_apart() -> None:
    [a] = layouts_of(1)
    b, _ = layouts_of(2)
    assert a.layout_id != b.layout_id
    assert a.layout_id == layouts_of(1)[0].layout_id
    assert 0 <= a.crc < 2**63
