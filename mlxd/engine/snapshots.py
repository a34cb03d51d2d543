"""Prefixes of models whose state cannot be cut: windows, recurrent and convolution state.

Such a state stands for all tokens before it, and only for these. So it is kept
whole, as it was at some positions of a prompt: where a prefill chunk ended, and
at the prompt's end. Between two of them, layers with full attention keep only
the columns that came in between.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from mlxd.engine.prefix import DIGEST, Restored

#: Tokens that lie at least between two snapshots of one prompt.
SPACING = 256
#: And at least this share of the tokens before: a prompt of 30,000 has some 20 snapshots, and
#: any prefix of it is found to four fifths.
SPREAD = 0.25
#: Classes whose state is one column per token, which can be cut.
_COLUMNS = (KVCache, QuantizedKVCache)
#: Classes that count the tokens they hold, padding included.
_COUNTING = (*_COLUMNS, RotatingKVCache)
_ROOT = b""


@dataclass(slots=True)
class _Snapshot:
    """A prompt's state at one position, less the columns that the one before it has.

    Attributes:
        length: tokens up to that position.
        states: of each leaf cache, a batch of one row.
        children: addresses of those that go on from here.
    """

    length: int
    parent: bytes = _ROOT
    states: list[Any] = field(default_factory=list)
    children: set[bytes] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in _arrays(self.states))


class Snapshots:
    """A tree of snapshots of at most `max_bytes`; the least recently used go first.

    A snapshot is addressed by its tokens since the one before, and that one's
    address. Every use of one also uses those before it, and counts these as more
    recent: whatever is evicted has none behind it.
    """

    def __init__(self, make: Callable[[], list[Any]], max_bytes: int) -> None:
        """Start empty.

        Args:
            make: makes the model's empty caches, one per layer.
        """
        self._make = make
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._root = _Snapshot(0)
        self._known: OrderedDict[bytes, _Snapshot] = OrderedDict()  # least recent first

    @property
    def has_room(self) -> bool:
        """Whether it may hold anything."""
        return self._max_bytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return self._nbytes

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._known)

    def resize(self, max_bytes: int) -> None:
        """Change the limit; what is above it goes, the least recently used first."""
        self._max_bytes = max_bytes
        while self._nbytes > max_bytes:
            self._evict()

    def clear(self) -> None:
        """Forget all snapshots."""
        self._known.clear()
        self._root.children.clear()
        self._nbytes = 0

    def restore(self, tokens: Sequence[int]) -> Restored | None:
        """The state at the furthest known position of a prompt, or None.

        The last token is never part of it: a decode step has to compute that one.
        The caches are the caller's to extend.

        Args:
            tokens: the whole prompt.
        """
        path = self._path(tokens[:-1])
        if not path:
            return None
        self._touch(path)
        held = [self._known[address] for address in path]
        caches = self._make()
        for index, cache in enumerate(_leaves(caches)):
            cache.state = _joined(cache, [snapshot.states[index] for snapshot in held])
        return Restored(held[-1].length, caches)

    def passing(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """Keep the state of a prompt that goes on, if the last snapshot is far enough behind.

        Args:
            tokens: those whose state the row holds.
            caches: one per layer; a batch of rows.
            row: which of them.
        """
        path = self._path(tokens)
        behind = self._known[path[-1]].length if path else 0
        if len(tokens) - behind >= max(SPACING, SPREAD * behind):
            self._add(path, tokens, caches, row)

    def store(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """Keep the state of a whole prompt, unless it is known. The arguments are as above."""
        path = self._path(tokens)
        if not path or self._known[path[-1]].length < len(tokens):
            self._add(path, tokens, caches, row)

    def _add(
        self, path: Sequence[bytes], tokens: Sequence[int], caches: Sequence[Any], row: int
    ) -> None:
        """Put a snapshot behind those of the path, if it fits in beside them."""
        leaves = list(_leaves(caches))
        length = len(tokens)
        if any(isinstance(leaf, _COUNTING) and leaf.offset != length for leaf in leaves):
            return  # padding has gone into what cannot be cut
        parent, before = (path[-1], self._known[path[-1]]) if path else (_ROOT, self._root)
        states = [_cut(leaf, row, before.length) for leaf in leaves]
        snapshot = _Snapshot(length, parent, states)
        self._touch(path)
        if not self._make_room(snapshot.nbytes, keep=len(path)):
            return
        mx.async_eval(_arrays(states))
        address = _address(parent, tokens[before.length :])
        self._known[address] = snapshot
        self._nbytes += snapshot.nbytes
        before.children.add(address)
        self._touch([*path, address])

    def _make_room(self, nbytes: int, keep: int) -> bool:
        """Evict until so many bytes fit in, but not the `keep` most recent ones."""
        while self._nbytes + nbytes > self._max_bytes:
            if len(self._known) <= keep:
                return False
            self._evict()
        return True

    def _evict(self) -> None:
        """Drop the least recently used one, which has no children."""
        address, snapshot = self._known.popitem(last=False)
        self._nbytes -= snapshot.nbytes
        self._at(snapshot.parent).children.remove(address)

    def _at(self, address: bytes) -> _Snapshot:
        return self._known[address] if address else self._root

    def _path(self, tokens: Sequence[int], address: bytes = _ROOT) -> list[bytes]:
        """Addresses of the snapshots that lead furthest into these tokens, from `address` on."""
        start = self._at(address)
        best: list[bytes] = []
        for end in {self._known[child].length for child in start.children}:
            child = _address(address, tokens[start.length : end])
            if end <= len(tokens) and child in self._known:
                path = [child, *self._path(tokens, child)]
                best = max(best, path, key=lambda each: self._at(each[-1]).length if each else 0)
        return best

    def _touch(self, path: Sequence[bytes]) -> None:
        """Make a path the most recent, its first one last."""
        for address in reversed(path):
            self._known.move_to_end(address)


def _address(parent: bytes, tokens: Sequence[int]) -> bytes:
    content = parent + np.asarray(tokens, dtype="<u4").tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Every cache, those in lists one by one."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _arrays(tree: Any) -> list[mx.array]:
    leaves = cast("dict[str, Any]", tree_flatten(tree, destination={}))
    return [leaf for leaf in leaves.values() if isinstance(leaf, mx.array)]


def _cut(cache: Any, row: int, start: int) -> Any:
    """One row of a cache's state, as copies: a view would keep the whole batch alive.

    Where the state is columns, those from `start` on; of a window, what the next call sees.
    """
    index = mx.array([row])

    def columns(array: mx.array) -> mx.array:
        return mx.take(array[:, :, start : cache.offset], index, axis=0)

    if isinstance(cache, _COLUMNS):
        keys, values, *rest = cache.state
        return (tree_map(columns, keys), tree_map(columns, values), *rest)
    state = _in_window(cache) if isinstance(cache, RotatingKVCache) else cache.state
    return _mapped(lambda array: mx.take(array, index, axis=0), state)


def _in_window(cache: RotatingKVCache) -> Any:
    """The cache's state as its next call would cut it: after a call with several tokens, it
    still holds more than a window."""
    keys, values, offset, keep, window, end = cache.state
    beyond = end - window
    if keys is None or beyond <= 0:
        return cache.state

    def cut(array: mx.array) -> mx.array:
        return mx.concatenate([array[:, :, :keep], array[:, :, keep + beyond :]], axis=2)

    return (cut(keys), cut(values), offset, keep, window, window)


def _joined(cache: Any, states: Sequence[Any]) -> Any:
    """The state of a cache at the end of a path, in arrays of its own."""
    last = states[-1]
    if not isinstance(cache, _COLUMNS):
        return _mapped(lambda array: array[:], last)

    def joined(*arrays: mx.array) -> mx.array:
        return mx.concatenate(list(arrays), axis=2)

    keys = tree_map(joined, *[state[0] for state in states])
    values = tree_map(joined, *[state[1] for state in states])
    return (keys, values, *last[2:])


def _mapped(change: Callable[[mx.array], mx.array], state: Any) -> Any:
    """A state with its arrays changed; numbers and None stay."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, mx.array) else leaf, state)
