"""KV of token sequences seen before, reused for requests that begin alike: one radix tree per cache salt.

Requests of different salts never share KV: the caller puts the weight version into the salt, and so KV computed by
older weights is not reused by newer requests. The same salt after a change of weights *would* reuse it: flush then.
Called by the scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor


class _Node:
    """The tokens between two branches and their KV, [layers, 2, kv_heads, n, head_dim]."""

    __slots__ = ("children", "kv", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], kv: Tensor | None, parent: _Node | None) -> None:
        self.tokens = tokens
        self.kv = kv
        self.parent = parent
        self.children: dict[int, _Node] = {}


class PrefixCache:
    """Holds the KV of at most `capacity` tokens; the least recently used ends of sequences go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._roots: dict[str, _Node] = {}
        # A node is always touched after its descendants, so the oldest entry has no children left.
        self._by_use: OrderedDict[_Node, str] = OrderedDict()
        self._tokens = 0

    @property
    def enabled(self) -> bool:
        return self._capacity > 0

    @property
    def tokens(self) -> int:
        """Tokens whose KV is held."""
        return self._tokens

    def match(self, salt: str, tokens: Sequence[int]) -> tuple[int, list[Tensor]]:
        """The longest prefix of `tokens` held under `salt`: its length, and its KV in consecutive segments."""
        length, path = self._walk(salt, tokens)
        self._touch(salt, path)
        segments = []
        left = length
        for node in path:
            assert node.kv is not None
            used = min(left, len(node.tokens))
            segments.append(node.kv[:, :, :, :used])
            left -= used
        return length, segments

    def insert(self, salt: str, tokens: Sequence[int], kv: Tensor) -> None:
        """Keep a copy of `kv` [layers, 2, kv_heads, len(tokens), head_dim] where it is not held yet."""
        if not self.enabled or not tokens:
            return
        length, path = self._walk(salt, tokens)
        if length == len(tokens):
            self._touch(salt, path)
            return
        root = self._roots.setdefault(salt, _Node((), None, None))
        inside = length - sum(len(node.tokens) for node in path[:-1])
        if path and inside < len(path[-1].tokens):
            path[-1] = self._split(salt, path[-1], inside)
        parent = path[-1] if path else root
        leaf = _Node(tuple(tokens[length:]), kv[:, :, :, length:].clone(), parent)
        parent.children[leaf.tokens[0]] = leaf
        self._tokens += len(leaf.tokens)
        self._touch(salt, [*path, leaf])
        while self._tokens > self._capacity:
            self._evict_oldest()

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._by_use.clear()
        self._tokens = 0

    def _walk(self, salt: str, tokens: Sequence[int]) -> tuple[int, list[_Node]]:
        """Matched length and the nodes on the way; the last one may be matched in part only."""
        length = 0
        path: list[_Node] = []
        node = self._roots.get(salt)
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is None:
                break
            common = _common(node.tokens, tokens, length)
            length += common
            path.append(node)
            if common < len(node.tokens):
                break
        return length, path

    def _split(self, salt: str, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper part, which becomes the parent of the rest."""
        assert node.kv is not None and node.parent is not None
        upper = _Node(node.tokens[:at], node.kv[:, :, :, :at].clone(), node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.kv, node.parent = node.tokens[at:], node.kv[:, :, :, at:].clone(), upper
        upper.children[node.tokens[0]] = node
        self._by_use[upper] = salt
        return upper

    def _touch(self, salt: str, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use[node] = salt
            self._by_use.move_to_end(node)

    def _evict_oldest(self) -> None:
        node, salt = self._by_use.popitem(last=False)
        assert node.parent is not None and not node.children
        del node.parent.children[node.tokens[0]]
        self._tokens -= len(node.tokens)
        if not self._roots[salt].children:
            del self._roots[salt]


def _common(edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """How many tokens of `edge` agree with `tokens` from `start` on."""
    limit = min(len(edge), len(tokens) - start)
    if edge[:limit] == tuple(tokens[start : start + limit]):
        return limit
    return next(i for i in range(limit) if edge[i] != tokens[start + i])
