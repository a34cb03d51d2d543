"""Slots of sliding-window layers (`RotatingKVCache`): a ring of exactly the window.

The first `keep` columns hold the first tokens for good; the others are the
ring: column = keep + (position - keep) mod (window - keep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxd.engine.slots.base import LayerSlots, LayerSpec
from mlxd.engine.slots.full import FullStep


@dataclass(frozen=True, slots=True)
class RingSpec(LayerSpec):
    """Keys [heads, window, key_dim] and values [heads, window, value_dim], whatever the capacity.

    No `ColumnSpec`: a ring holds its last tokens, and no prefix of them.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int
    keep: int

    @classmethod
    def of(cls, cache: Any) -> RingSpec:
        """The layer's shape, from a `RotatingKVCache` that holds at least one token."""
        keys, values, _offset, keep, window, _index = cache.state
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window, keep)

    @property
    def slots(self) -> type[LayerSlots]:
        """A ring."""
        return RingSlots

    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Keys, values."""
        return [
            ((self.heads, self.window, self.key_dim), self.dtype),
            ((self.heads, self.window, self.value_dim), self.dtype),
        ]

    @property
    def longest_padded(self) -> float:
        """Further, padding would rotate real tokens out."""
        return self.window


class RingSlots(LayerSlots):
    """Keys and values [rows, heads, window, dim] of one layer."""

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write the tokens that the row still sees: the first `keep`, and the last ones.

        Right padding is only possible where nothing rotated: all of the
        batch's tokens fit in the window.
        """
        keys, values, offset, keep, window, index = cache.state
        if length < offset and offset > window:
            raise ValueError("a padded row cannot be read from a rotated cache")
        for target, source in zip(self._arrays, (keys, values), strict=True):
            tokens = _in_order(source[row], offset, keep, index)
            kept = min(keep, length)
            target[slot, :, :kept] = tokens[:, :kept]
            if length > keep:
                end = tokens.shape[1] - max(0, offset - length)
                _write(target, slot, tokens[:, keep:end], keep, length)

    @staticmethod
    def bind(
        spec: RingSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> RingStep:
        """A step over the ring, or over its first columns while no row has filled more."""
        return RingStep(arrays[0], arrays[1], positions, columns, spec.keep)


def _in_order(state: mx.array, offset: int, keep: int, index: int) -> mx.array:
    """Tokens [heads, n, dim], the first `keep` and then the last ones, oldest first.

    `RotatingKVCache` holds them so after a call with several tokens (then
    `index` is n and there may be more than a window of them), and rotated at
    `index` after a call with one, or with room behind `index`.
    """
    if index == state.shape[1]:
        return state
    if index < offset:
        parts = [state[:, :keep], state[:, index:], state[:, keep:index]]
        return mx.concatenate(parts, axis=1)
    return state[:, :index]


def _write(target: mx.array, slot: int, tokens: mx.array, keep: int, length: int) -> None:
    """Put the last of tokens [heads, n, dim], which end at position `length` - 1, in the ring."""
    ring = target.shape[2] - keep
    tokens = tokens[:, -ring:]
    count = tokens.shape[1]
    first = (length - keep - count) % ring
    head = min(count, ring - first)
    target[slot, :, keep + first : keep + first + head] = tokens[:, :head]
    if head < count:
        target[slot, :, keep : keep + count - head] = tokens[:, head:]


class RingStep(FullStep):
    """One decode step of one sliding-window layer."""

    def __init__(
        self, keys: mx.array, values: mx.array, positions: mx.array, columns: int, keep: int
    ) -> None:
        super().__init__(keys, values, positions, columns)
        self._keep = keep
        self._ring = keys.shape[2] - keep

    def _index(self) -> mx.array:
        """Over each row's oldest column that is not kept."""
        turning = self._keep + (self.offset - self._keep) % self._ring
        if self._keep == 0:
            return turning
        return mx.where(self.offset < self._keep, self.offset, turning)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Boolean [rows, 1, 1, columns]: filled, and within `window_size` if given."""
        columns = mx.arange(self._columns)[None]
        position = self.offset[:, None]
        age = (position - columns) % self._ring
        visible = age <= position - self._keep
        if self._keep:
            kept = columns < self._keep
            age = mx.where(kept, position - columns, age)
            visible = mx.where(kept, age >= 0, visible)
        if window_size is not None and window_size < self._ring + self._keep:
            visible = visible & (age < window_size)
        return visible[:, None, None, :]
