"""The prefix cache: longest match per salt, splitting, eviction of the least recently used."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.engines.embedded.prefix_cache import PrefixCache


def _kv(tokens: list[int]) -> Tensor:
    """KV in which every position holds its token id: [1 layer, 2, 1 head, n, 1]."""
    return torch.tensor(tokens, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 1)


def _insert(cache: PrefixCache, salt: str, tokens: list[int]) -> None:
    cache.insert(salt, tokens, _kv(tokens))


def _match(cache: PrefixCache, salt: str, tokens: list[int]) -> list[int]:
    """The tokens whose KV the cache gives; checks that it is the KV of exactly these."""
    length, segments = cache.match(salt, tokens)
    given = [int(x) for segment in segments for x in segment[0, 1, 0, :, 0].tolist()]
    assert given == tokens[:length]
    return given


def test_gives_the_longest_common_prefix() -> None:
    cache = PrefixCache(100)
    _insert(cache, "s", [1, 2, 3, 4])
    assert _match(cache, "s", [1, 2, 9]) == [1, 2]
    assert _match(cache, "s", [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert _match(cache, "s", [2, 3]) == []


def test_branches_share_their_beginning() -> None:
    cache = PrefixCache(100)
    _insert(cache, "s", [1, 2, 3, 4])
    _insert(cache, "s", [1, 2, 7, 8, 9])
    _insert(cache, "s", [1])
    assert cache.tokens == 4 + 3
    assert _match(cache, "s", [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert _match(cache, "s", [1, 2, 7, 8]) == [1, 2, 7, 8]


def test_another_salt_sees_nothing() -> None:
    """Fails when the root is not looked up by salt."""
    cache = PrefixCache(100)
    _insert(cache, "engine:1", [1, 2, 3])
    assert _match(cache, "engine:2", [1, 2, 3]) == []
    assert _match(cache, "", [1, 2, 3]) == []


def test_evicts_what_was_not_used_for_longest() -> None:
    cache = PrefixCache(6)
    _insert(cache, "a", [1, 2])
    _insert(cache, "b", [3, 4])
    _insert(cache, "c", [5, 6])
    _match(cache, "a", [1, 2])
    _insert(cache, "d", [7, 8])
    assert _match(cache, "b", [3, 4]) == []
    assert _match(cache, "a", [1, 2]) == [1, 2]
    assert cache.tokens == 6


def test_evicts_ends_before_beginnings() -> None:
    cache = PrefixCache(5)
    _insert(cache, "s", [1, 2, 3])
    _insert(cache, "s", [1, 2, 4])
    _insert(cache, "s", [1, 2, 5, 6])
    assert _match(cache, "s", [1, 2, 3]) == [1, 2]
    assert _match(cache, "s", [1, 2, 5, 6]) == [1, 2, 5, 6]
    _insert(cache, "t", [1, 2, 3, 4, 5])
    assert _match(cache, "s", [1, 2]) == []
    assert cache.tokens == 5


def test_what_was_given_survives_eviction() -> None:
    cache = PrefixCache(3)
    _insert(cache, "s", [1, 2, 3])
    _, segments = cache.match("s", [1, 2, 3])
    _insert(cache, "s", [4, 5, 6])
    assert segments[0][0, 0, 0, :, 0].tolist() == [1, 2, 3]


def test_clear_and_capacity_zero() -> None:
    cache, off = PrefixCache(10), PrefixCache(0)
    _insert(cache, "s", [1, 2])
    _insert(off, "s", [1, 2])
    cache.clear()
    assert _match(cache, "s", [1, 2]) == [] == _match(off, "s", [1, 2])
    assert cache.tokens == 0
