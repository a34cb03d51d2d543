"""The prefix cache: state of prompts that were computed before, kept in blocks of tokens.

A block is addressed by its tokens and all tokens before it, so prompts that
begin alike share blocks whoever sent them. It suits models whose layers all
have full attention, quantised or not: there, any prefix of a state is the state
of the prefix.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxd.engine.slots import ColumnSpec, LayerSpec

#: Tokens of a block. Small, because what chat templates begin with is short: the
#: starter's 24 tokens are a quarter of a short prompt.
BLOCK = 8
#: Bytes of a block's address.
DIGEST = 16

#: Arrays [layers, heads, BLOCK, …], as the spec's columns, of each group of layers of one spec.
Block = list[list[mx.array]]


@dataclass(frozen=True, slots=True)
class Restored:
    """State of a prompt's first `length` tokens, one cache per layer, a batch of one row."""

    length: int
    caches: Sequence[Any]


class Prefixes(Protocol):
    """A prefix cache, as the runner uses it."""

    @property
    def has_room(self) -> bool:
        """Whether it may hold anything."""

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds."""

    def resize(self, max_bytes: int) -> None:
        """Change the limit; what is above it goes, the least recently used first."""

    def clear(self) -> None:
        """Forget everything."""

    def restore(self, tokens: Sequence[int]) -> Restored | None:
        """The longest known prefix of a prompt, its last token left out, or None."""

    def passing(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """A prefill has computed these first tokens of its prompt, and goes on."""

    def store(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """Keep what it can of a prompt's state: row `row` of the caches, one per layer."""


class PrefixCache:
    """Blocks of at most `max_bytes`; the least recently used go first.

    Every use of a block also uses the blocks before it, and counts those as more
    recent. So whatever is evicted has no block behind it that it would strand.
    """

    def __init__(self, layout: Sequence[LayerSpec], max_bytes: int) -> None:
        """Start empty.

        Raises:
            ValueError: the layout is not supported.
        """
        if not self.supports(layout):
            raise ValueError("a prefix cache needs full attention in every layer")
        groups: defaultdict[ColumnSpec, list[int]] = defaultdict(list)
        for index, spec in enumerate(layout):
            if isinstance(spec, ColumnSpec):
                groups[spec].append(index)
        self._groups = list(groups.items())
        self._layers = len(layout)
        self._block_bytes = sum(spec.row_bytes(BLOCK) for spec in layout)
        self._capacity = max_bytes // self._block_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recent first

    @staticmethod
    def supports(layout: Sequence[LayerSpec]) -> bool:
        """Whether all layers have full attention, and there are any."""
        return len(layout) > 0 and all(isinstance(s, ColumnSpec) for s in layout)

    @property
    def has_room(self) -> bool:
        """Whether it can hold any block at all."""
        return self._capacity > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return len(self._blocks) * self._block_bytes

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def resize(self, max_bytes: int) -> None:
        """Change the limit; what is above it goes, the least recently used first."""
        self._capacity = max_bytes // self._block_bytes
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()

    def restore(self, tokens: Sequence[int]) -> Restored | None:
        """The longest known prefix of a prompt, or None.

        The last token is never part of it: a decode step has to compute that one.
        The caches are the caller's to extend and trim; their arrays are not
        evaluated, and stay valid when the blocks are evicted.

        Args:
            tokens: the whole prompt.
        """
        addresses = self._known(addresses_of(tokens[:-1]))
        if not addresses:
            return None
        self._touch(addresses)
        blocks = [self._blocks[address] for address in addresses]
        length = len(blocks) * BLOCK
        caches: list[Any] = [None] * self._layers
        for group, (spec, layers) in enumerate(self._groups):
            parts = zip(*(block[group] for block in blocks), strict=True)
            arrays = [mx.concatenate(list(part), axis=2) for part in parts]
            for position, layer in enumerate(layers):
                row = slice(position, position + 1)
                caches[layer] = spec.cache([array[row] for array in arrays], length)
        return Restored(length, caches)

    def passing(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """Nothing: the whole prompt's state has these blocks, too."""

    def store(self, tokens: Sequence[int], caches: Sequence[Any], row: int) -> None:
        """Keep the whole blocks of a prompt's state that are not known yet, as far as they fit.

        Args:
            tokens: the tokens whose state columns 0..len(tokens) of the row hold.
            caches: one per layer; they may hold further rows and columns.
            row: which row of the caches' batch.
        """
        addresses = list(islice(addresses_of(tokens), self._capacity))
        known = self._known(addresses)
        unknown = addresses[len(known) :]
        # First, so that making room does not take the blocks that the new ones continue.
        self._touch(known)
        if not unknown:
            return
        while len(self._blocks) + len(unknown) > self._capacity:
            self._blocks.popitem(last=False)
        blocks = self._cut(caches, row, len(known), len(addresses))
        mx.async_eval(blocks)
        self._blocks.update(zip(unknown, blocks, strict=True))
        self._touch(addresses)

    def _cut(self, caches: Sequence[Any], row: int, first: int, end: int) -> list[Block]:
        """Blocks first..end of a row, as copies: a view would keep the whole prompt alive."""
        columns = slice(first * BLOCK, end * BLOCK)
        blocks: list[Block] = [[] for _ in range(end - first)]
        for spec, layers in self._groups:
            parts = zip(*(spec.columns(caches[layer]) for layer in layers), strict=True)
            arrays = [mx.stack([array[row, :, columns] for array in part]) for part in parts]
            for index, block in enumerate(blocks):
                inside = slice(index * BLOCK, (index + 1) * BLOCK)
                block.append([mx.contiguous(array[:, :, inside]) for array in arrays])
        return blocks

    def _known(self, addresses: Iterator[bytes] | Sequence[bytes]) -> list[bytes]:
        """The leading addresses that have a block."""
        return list(takewhile(self._blocks.__contains__, addresses))

    def _touch(self, addresses: Sequence[bytes]) -> None:
        """Make a prompt's leading blocks the most recent, the first one last."""
        for address in reversed(addresses):
            self._blocks.move_to_end(address)


def addresses_of(tokens: Sequence[int]) -> Iterator[bytes]:
    """Addresses of the whole blocks of a prompt, each a digest of the one before and its tokens."""
    encoded = np.asarray(tokens, dtype="<u4").tobytes()
    width = BLOCK * 4
    address = b""
    for start in range(0, len(encoded) - width + 1, width):
        content = address + encoded[start : start + width]
        address = hashlib.blake2b(content, digest_size=DIGEST).digest()
        yield address


def batched(states: Sequence[Sequence[Any]]) -> list[Any]:
    """States of the same number of tokens as one batch, to be prefilled together.

    Args:
        states: each one cache of columns per layer; their rows follow one another in the batch.

    Raises:
        ValueError: the states differ in their number of tokens or of layers.
    """
    return [_joined(layer) for layer in zip(*states, strict=True)]


def _joined(caches: Sequence[Any]) -> Any:
    """One layer's caches as one, with all their rows."""
    joined = type(caches[0])()
    lengths = {cache.offset for cache in caches}
    if len(lengths) > 1:
        raise ValueError(f"states of {sorted(lengths)} tokens cannot be one batch")
    length = lengths.pop()
    if length > 0:
        states = [cache.state for cache in caches]

        def together(*arrays: mx.array) -> mx.array:
            return mx.concatenate([array[:, :, :length] for array in arrays])

        keys = tree_map(together, *(state[0] for state in states))
        values = tree_map(together, *(state[1] for state in states))
        joined.state = (keys, values, length, *states[0][3:])
    return joined
