"""Slots of full-attention layers (`KVCache`): column = position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxd.engine.slots.base import LayerSpec


def resized(array: mx.array, rows: int) -> mx.array:
    """The first rows of `array`, or all of them and zeroed ones behind."""
    old = array.shape[0]
    if rows <= old:
        # A copy, so that the larger buffer can go.
        return mx.contiguous(array[:rows])
    padding = mx.zeros((rows - old, *array.shape[1:]), array.dtype)
    return mx.concatenate([array, padding], axis=0)


class FullSlots:
    """Keys and values [rows, heads, capacity, dim] of one layer."""

    def __init__(self, spec: LayerSpec, rows: int, capacity: int) -> None:
        columns = spec.columns(capacity)
        self.keys = mx.zeros((rows, spec.heads, columns, spec.key_dim), spec.dtype)
        self.values = mx.zeros((rows, spec.heads, columns, spec.value_dim), spec.dtype)

    @classmethod
    def spec(cls, cache: Any) -> LayerSpec:
        """The layer's shape, from a `KVCache` that holds at least one token."""
        keys, values, _offset = cache.state
        return LayerSpec(cls, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, None)

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write columns 0..length of the row."""
        keys, values, _offset = cache.state
        self.keys[slot, :, :length] = keys[row, :, :length]
        self.values[slot, :, :length] = values[row, :, :length]

    def move(self, slot: int, source: FullSlots, source_slot: int) -> None:
        """Copy all columns that the source has."""
        columns = source.keys.shape[2]
        self.keys[slot, :, :columns] = source.keys[source_slot]
        self.values[slot, :, :columns] = source.values[source_slot]

    def resize(self, rows: int) -> None:
        """Copy into arrays of `rows` slots and evaluate, so that only one layer exists twice."""
        self.keys, self.values = resized(self.keys, rows), resized(self.values, rows)
        mx.eval(self.keys, self.values)

    def arrays(self) -> list[mx.array]:
        """Keys, values."""
        return [self.keys, self.values]

    def adopt(self, arrays: list[mx.array]) -> None:
        """Keys, values, from a step."""
        self.keys, self.values = arrays

    @staticmethod
    def bind(
        spec: LayerSpec, arrays: list[mx.array], positions: mx.array, columns: int
    ) -> FullStep:
        """A step over the first `columns` columns."""
        return FullStep(arrays[0], arrays[1], positions, columns)


class FullStep:
    """One decode step of one full-attention layer."""

    def __init__(self, keys: mx.array, values: mx.array, positions: mx.array, columns: int) -> None:
        self._keys, self._values = keys, values
        self._columns = min(columns, keys.shape[2])
        self.offset = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, 1, dim] at each row's position."""
        # put_along_axis donates its buffer; slice_update with a dynamic start
        # copied the whole array.
        index = self.offset[:, None, None, None]
        self._keys = mx.put_along_axis(self._keys, index, keys, axis=2)
        self._values = mx.put_along_axis(self._values, index, values, axis=2)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns that can hold tokens: a view, which matrix products read in place."""
        return self._keys[:, :, : self._columns], self._values[:, :, : self._columns]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Columns up to the row's position, within `window_size` of it where given."""
        age = self.offset[:, None] - mx.arange(self._columns)[None]
        visible = age >= 0
        if window_size is not None:
            visible = visible & (age < window_size)
        return visible[:, None, None, :]

    def arrays(self) -> list[mx.array]:
        """Keys, values."""
        return [self._keys, self._values]
