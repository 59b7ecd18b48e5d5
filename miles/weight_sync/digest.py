"""A digest of global tensors that does not depend on how they are laid out or sharded.

A tensor is a matrix of 8-byte words: rows are its leading dimensions, columns its last one. Its sum is
`sum(word[r, c] * A(r) * B(c))` modulo 2^64 with odd weights of the global row and column, so a shard that is cut at
8-byte boundaries computes its part alone and parts add up; any other cut is refused. An odd weight never hides a
changed word. The sums are mixed with name, dtype and shape into one number. It guards against torn, stale, swapped
and misplaced bytes, not against an adversary; rows that differ in nothing but the top bit of words can be exchanged.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

from miles.weight_sync.messages import Box

_MASK = (1 << 64) - 1
_WORDS_PER_CHUNK = 1 << 26
_ROW_SALT = 0x9E3779B97F4A7C15
_COLUMN_SALT = 0xD1B54A32D192ED03


def _mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@functools.lru_cache(maxsize=256)
def _weights(start: int, length: int, salt: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random weights of the indexes [start, start + length), int64."""
    words = torch.arange(start, start + length, dtype=torch.int64, device=device) * _signed(_ROW_SALT) + _signed(salt)
    words = (words ^ _shift_right(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift_right(words, 27)) * _signed(0x94D049BB133111EB)
    return (words ^ _shift_right(words, 31)) | 1


def _words(shard: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The shard as an int64 matrix, rows padded with zeros to whole words."""
    matrix = shard.detach().reshape(-1, shard.shape[-1] if shard.dim() else 1)
    if row_bytes % 8:
        raw = matrix.contiguous().view(torch.uint8)
        return torch.nn.functional.pad(raw, (0, -row_bytes % 8)).view(torch.int64)
    try:
        return matrix.view(torch.int64)
    except RuntimeError:  # strides or the offset into the storage are not whole words
        return matrix.clone(memory_format=torch.contiguous_format).view(torch.int64)


def partial_sum(name: str, shard: torch.Tensor, global_shape: tuple[int, ...], box: Box) -> int:
    """The part of a tensor's sum that `shard`, its box `box`, holds; modulo 2^64.

    Raises ValueError, naming the tensor, when the box is not cut at 8-byte boundaries of the last dimension.
    """
    shape = global_shape or (1,)
    box = box or ((0, 1),)
    if math.prod(length for _, length in box) == 0:
        return 0
    itemsize = shard.element_size()
    start, length = box[-1]
    first, end = start * itemsize, (start + length) * itemsize
    if first % 8 or (end % 8 and start + length != shape[-1]):
        raise ValueError(
            f"{name}: the box {box} of {global_shape} cuts a row of {shard.dtype} at bytes {first}..{end}; "
            "a digest needs cuts at multiples of 8 bytes"
        )
    words = _words(shard, length * itemsize)
    columns = _weights(first // 8, words.shape[1], _COLUMN_SALT, words.device)
    rows = _row_weights(shape[:-1], box[:-1], words.device)
    return _weighted_sum(words, rows, columns) & _MASK


def _weighted_sum(words: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> int:
    """`rows @ words @ columns` in wrapping int64. One pass over the words, about a memcpy."""
    if words.device.type == "cpu":
        return int(torch.dot(torch.mv(words, columns), rows))
    step = max(1, _WORDS_PER_CHUNK // words.shape[1])  # devices have no integer matrix product
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for at in range(0, words.shape[0], step):
        total += ((words[at : at + step] * columns).sum(1) * rows[at : at + step]).sum()
    return int(total)


def _row_weights(leading: tuple[int, ...], box: Box, device: torch.device) -> torch.Tensor:
    """The weight of each row of a box, by its global row (the flattened index of the leading dimensions)."""
    if not leading:
        return _weights(0, 1, _ROW_SALT, device)
    table = _weights(0, math.prod(leading), _ROW_SALT, device).view(leading)
    for dim, (start, length) in enumerate(box):
        table = table.narrow(dim, start, length)
    return table.reshape(-1)


def add(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the partial sums of ranks, per tensor, modulo 2^64."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = (sums.get(name, 0) + value) & _MASK
    return sums


def combine(sums: Mapping[str, int], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Mix whole sums with each tensor's name, (dtype, shape) into one digest of 16 hex digits.

    Raises ValueError when a tensor has no sum.
    """
    missing = sorted(tensors.keys() ^ sums.keys())
    if missing:
        raise ValueError(f"the sums and the tensors do not name the same: {', '.join(missing[:5])}")
    total = 0
    for name, (dtype, shape) in tensors.items():
        identity = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}".encode()).digest()
        total = (total + _mix(sums[name] ^ int.from_bytes(identity[:8], "little"))) & _MASK
    return f"{total:016x}"
