"""A tokenizer without a file: one id per UTF-8 byte, 257 at the end of a sequence."""

from __future__ import annotations

from collections.abc import Sequence


class ByteEncoder:
    """Satisfies the TextEncoder of `miles.data` and the TextDecoder of `miles.rewards`."""

    eos_ids: tuple[int, ...] = (257,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
