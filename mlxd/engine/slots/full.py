"""Slots of full-attention layers (`KVCache`): column = position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxd.engine.slots.base import ColumnSpec, LayerSlots


@dataclass(frozen=True, slots=True)
class FullSpec(ColumnSpec):
    """Keys [heads, capacity, key_dim] and values [heads, capacity, value_dim] of a row."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, cache: Any) -> FullSpec:
        """The layer's shape, from a `KVCache` that holds at least one token."""
        keys, values, _offset = cache.state
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)

    @property
    def slots(self) -> type[LayerSlots]:
        """Column = position."""
        return FullSlots

    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Keys, values."""
        return [
            ((self.heads, capacity, self.key_dim), self.dtype),
            ((self.heads, capacity, self.value_dim), self.dtype),
        ]

    def columns(self, cache: KVCache) -> list[mx.array]:
        """Keys, values."""
        keys, values, _offset = cache.state
        return [keys, values]

    def cache(self, arrays: Sequence[mx.array], length: int) -> KVCache:
        """mlx-lm's plain cache, with the arrays as its own."""
        keys, values = arrays
        cache = KVCache()
        cache.state = (keys, values, length)
        return cache


class FullSlots(LayerSlots):
    """Keys and values [rows, heads, capacity, dim] of one layer."""

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write columns 0..length of the row."""
        keys, values, _offset = cache.state
        for target, source in zip(self._arrays, (keys, values), strict=True):
            target[slot, :, :length] = source[row, :, :length]

    @staticmethod
    def bind(
        spec: FullSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> FullStep:
        """A step over the first `columns` columns."""
        return FullStep(arrays[0], arrays[1], positions, columns)


class FullStep:
    """One decode step of one full-attention layer.

    `keys` and `values` are public because some models tie them to other arrays
    of the same step.
    """

    def __init__(self, keys: mx.array, values: mx.array, positions: mx.array, columns: int) -> None:
        self.keys, self.values = keys, values
        self._columns = min(columns, keys.shape[2])
        self.offset = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, 1, dim] at each row's position; what attention reads."""
        # put_along_axis donates its buffer; slice_update with a dynamic start
        # copied the whole array.
        index = self._index()[:, None, None, None]
        self.keys = mx.put_along_axis(self.keys, index, keys, axis=2)
        self.values = mx.put_along_axis(self.values, index, values, axis=2)
        return self.keys_and_values()

    def _index(self) -> mx.array:
        """Int32 [rows], the column that each row writes."""
        return self.offset

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns that can hold tokens: a view, which matrix products read in place."""
        return self.keys[:, :, : self._columns], self.values[:, :, : self._columns]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Boolean [rows, 1, 1, columns]: up to the position, within `window_size` if given."""
        return columns_mask(self.offset, self._columns, window_size)

    def arrays(self) -> list[mx.array]:
        """Keys, values."""
        return [self.keys, self.values]


def columns_mask(positions: mx.array, columns: int, window_size: int | None) -> mx.array:
    """Boolean [rows, 1, 1, columns] of the columns that rows at these positions may see."""
    age = positions[:, None] - mx.arange(columns)[None]
    visible = age >= 0
    if window_size is not None:
        visible = visible & (age < window_size)
    return visible[:, None, None, :]
