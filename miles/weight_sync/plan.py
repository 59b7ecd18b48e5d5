"""Which bytes to read from which rank: intersections of the boxes that sources hold with those a target wants.

Pure and computed once per pair of layouts. Every wanted byte is read exactly once, also where sources hold replicas,
and neighbours in both memories become one region, so that equal layouts are one READ of the whole slot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles.weight_sync.messages import ALIGN, Box, Layout, TensorEntry, make_layout


class PlanError(ValueError):
    """The sources do not hold what the target wants; the message names the tensor."""


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` at `source` in the slot of the rank `rank` go to `target` in the target's staging."""

    rank: int
    source: int
    target: int
    nbytes: int


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    out: list[tuple[int, int]] = []
    for (start_a, length_a), (start_b, length_b) in zip(a, b, strict=True):
        start = max(start_a, start_b)
        end = min(start_a + length_a, start_b + length_b)
        if end <= start:
            return None
        out.append((start, end - start))
    return tuple(out)


def subtract(box: Box, cut: Box) -> list[Box]:
    """The parts of `box` outside `cut`, disjoint; `cut` must lie inside `box`."""
    rest: list[Box] = []
    kept: list[tuple[int, int]] = list(box)
    for dim, ((start, length), (cut_start, cut_length)) in enumerate(zip(box, cut, strict=True)):
        before = (start, cut_start - start)
        after = (cut_start + cut_length, start + length - cut_start - cut_length)
        rest.extend((*kept[:dim], part, *kept[dim + 1 :]) for part in (before, after) if part[1])
        kept[dim] = (cut_start, cut_length)
    return rest


def whole(shape: tuple[int, ...]) -> Box:
    """The box of the whole tensor."""
    return tuple((0, length) for length in shape)


def tensors_of(layouts: Sequence[Layout]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (dtype, global shape) of every tensor, in order of appearance. Raises PlanError where ranks disagree."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layout in layouts:
        for entry in layout.entries:
            what = (entry.dtype, entry.global_shape)
            if tensors.setdefault(entry.name, what) != what:
                raise PlanError(f"{entry.name}: rank {layout.rank} has {what}, another {tensors[entry.name]}")
    return tensors


def full_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout of a staging that holds every global tensor whole. For one whole source it equals the source's."""
    sizes = {entry.name: _itemsize(entry) for layout in layouts for entry in layout.entries}
    return make_layout(
        0,
        1,
        (
            (name, dtype, shape, whole(shape), math.prod(shape) * sizes[name])
            for name, (dtype, shape) in tensors_of(layouts).items()
        ),
    )


def owners(layouts: Sequence[Layout]) -> list[list[int]]:
    """Per rank, the entries whose digest it contributes, so that each global word counts exactly once.

    A replica belongs to the first rank that holds it. Raises PlanError, naming the tensor, for boxes that overlap in
    part or leave a hole.
    """
    rest = {name: [whole(shape)] for name, (_, shape) in tensors_of(layouts).items()}
    mine: list[list[int]] = []
    for layout in layouts:
        owned: list[int] = []
        for index, entry in enumerate(layout.entries):
            volume = _volume(entry.box)
            taken, left = _take(rest[entry.name], entry.box)
            got = sum(_volume(box) for box in taken)
            if got == volume and volume:
                owned.append(index)
            elif got:
                raise PlanError(f"{entry.name}: the box {entry.box} of rank {layout.rank} overlaps another in part")
            rest[entry.name] = left
        mine.append(owned)
    for name, holes in rest.items():
        if any(_volume(hole) for hole in holes):
            raise PlanError(f"{name}: no rank holds {holes[0]}")
    return mine


def plan_reads(sources: Sequence[Layout], target: Layout) -> tuple[Region, ...]:
    """The regions that fill `target` from `sources`. Raises PlanError where a wanted box is not held, or dtypes differ.

    Readers of replicas start with different sources, by the target's rank, so that they spread.
    """
    at = target.rank % len(sources) if sources else 0
    ordered = [*sources[at:], *sources[:at]]
    held: dict[str, list[tuple[int, TensorEntry]]] = {}
    for layout in ordered:
        for entry in layout.entries:
            held.setdefault(entry.name, []).append((layout.rank, entry))
    regions: list[Region] = []
    for want in target.entries:
        rest = [want.box] if _volume(want.box) else []
        for rank, have in held.get(want.name, []):
            if (have.dtype, have.global_shape) != (want.dtype, want.global_shape):
                raise PlanError(f"{want.name}: {have.dtype}{have.global_shape} is not {want.dtype}{want.global_shape}")
            taken, rest = _take(rest, have.box)
            for box in taken:
                regions.extend(_runs(rank, have, want, box))
        if rest:
            raise PlanError(f"{want.name}: no rank holds {rest[0]}")
    return _merge(regions, sources, target)


def _take(boxes: list[Box], cut: Box) -> tuple[list[Box], list[Box]]:
    """(the parts of `boxes` inside `cut`, the parts outside)."""
    taken: list[Box] = []
    left: list[Box] = []
    for box in boxes:
        common = intersect(box, cut)
        if common is None:
            left.append(box)
        else:
            taken.append(common)
            left.extend(subtract(box, common))
    return taken, left


def _volume(box: Box) -> int:
    return math.prod(length for _, length in box)


def _itemsize(entry: TensorEntry) -> int:
    return entry.nbytes // max(1, _volume(entry.box))


def _runs(rank: int, have: TensorEntry, want: TensorEntry, box: Box) -> list[Region]:
    """The contiguous runs of `box` in both memories. The trailing dimensions that both hold whole are one run."""
    size = _itemsize(have)
    run_from = len(box)
    run = size
    while run_from:
        dim = run_from - 1
        run *= box[dim][1]
        run_from = dim
        if not box[dim] == have.box[dim] == want.box[dim]:
            break
    regions: list[Region] = []
    for index in itertools.product(*(range(length) for _, length in box[:run_from])):
        source = have.offset + _at(have.box, box, index) * size
        regions.append(Region(rank, source, want.offset + _at(want.box, box, index) * size, run))
    return regions


def _at(memory: Box, box: Box, index: tuple[int, ...]) -> int:
    """The element offset in `memory` of the element `index` (zeros for the missing dimensions) of `box`."""
    offset = 0
    for dim, (start, length) in enumerate(memory):
        inner = index[dim] if dim < len(index) else 0
        offset = offset * length + box[dim][0] - start + inner
    return offset


def _merge(regions: list[Region], sources: Sequence[Layout], target: Layout) -> tuple[Region, ...]:
    """Join regions that follow one another in both memories, across the padding behind a tensor but not inside one."""
    source_ends = {(layout.rank, entry.offset + entry.nbytes) for layout in sources for entry in layout.entries}
    target_ends = {entry.offset + entry.nbytes for entry in target.entries}
    merged: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.rank, region.target)):
        if merged:
            last = merged[-1]
            source_end, target_end = last.source + last.nbytes, last.target + last.nbytes
            if (rank := last.rank) == region.rank and last.target - last.source == region.target - region.source:
                padding = region.target - target_end
                between = (rank, source_end) in source_ends and target_end in target_ends and padding < ALIGN
                if padding == 0 or between:
                    merged[-1] = Region(rank, last.source, last.target, last.nbytes + padding + region.nbytes)
                    continue
        merged.append(region)
    return tuple(merged)
