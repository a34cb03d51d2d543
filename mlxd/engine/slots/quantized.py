"""Slots of full-attention layers with quantised keys and values (`QuantizedKVCache`).

Each of keys and values is three arrays: packed numbers, and a scale and a bias for
every group. A column is quantised when it is written, and never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlxd.engine.slots.base import ColumnSpec, LayerSlots
from mlxd.engine.slots.full import columns_mask

#: Packed numbers, scales, biases; each [rows, heads, columns, …].
Quantized = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class QuantizedSpec(ColumnSpec):
    """Keys and values of a row at `bits` bits, one scale and bias for `group_size` numbers."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    group_size: int
    bits: int

    @classmethod
    def of(cls, cache: Any) -> QuantizedSpec:
        """The layer's shape, from a `QuantizedKVCache` that holds at least one token."""
        keys, values, _offset, group_size, bits = cache.state
        key_groups, value_groups = keys[1].shape[3], values[1].shape[3]
        return cls(
            heads=keys[0].shape[1],
            key_dim=key_groups * group_size,
            value_dim=value_groups * group_size,
            dtype=keys[1].dtype,
            group_size=group_size,
            bits=bits,
        )

    @property
    def slots(self) -> type[LayerSlots]:
        """Column = position."""
        return QuantizedSlots

    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Of the keys, then of the values: packed numbers, scales, biases."""
        shapes: list[tuple[tuple[int, ...], mx.Dtype]] = []
        for dim in (self.key_dim, self.value_dim):
            groups = (self.heads, capacity, dim // self.group_size)
            packed = (self.heads, capacity, dim * self.bits // 32)
            shapes += [(packed, mx.uint32), (groups, self.dtype), (groups, self.dtype)]
        return shapes

    def columns(self, cache: QuantizedKVCache) -> list[mx.array]:
        """Of the keys, then of the values: packed numbers, scales, biases."""
        keys, values, *_ = cache.state
        return [*keys, *values]

    def cache(self, arrays: Sequence[mx.array], length: int) -> QuantizedKVCache:
        """mlx-lm's quantised cache, with the arrays as its own."""
        cache = QuantizedKVCache(self.group_size, self.bits)
        cache.state = (tuple(arrays[:3]), tuple(arrays[3:]), length, self.group_size, self.bits)
        return cache


class QuantizedSlots(LayerSlots):
    """The six arrays [rows, heads, capacity, …] of one layer."""

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write columns 0..length of the row, as the prefill quantised them."""
        keys, values, *_ = cache.state
        for target, source in zip(self._arrays, [*keys, *values], strict=True):
            target[slot, :, :length] = source[row, :, :length]

    @staticmethod
    def bind(
        spec: QuantizedSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> QuantizedStep:
        """A step over the first `columns` columns."""
        return QuantizedStep(spec, arrays, positions, columns)


class QuantizedStep:
    """One decode step of one layer; mlx-lm's attention looks for `bits` and `group_size`."""

    def __init__(
        self, spec: QuantizedSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> None:
        self.bits, self.group_size = spec.bits, spec.group_size
        self.offset = positions
        self.keys, self.values = tuple(arrays[:3]), tuple(arrays[3:])
        self._columns = min(columns, arrays[0].shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Quantise [rows, heads, 1, dim] and write it at each row's position."""
        self.keys, self.values = self._written(self.keys, keys), self._written(self.values, values)
        return self.keys_and_values()

    def _written(self, held: Quantized, new: mx.array) -> Quantized:
        index = self.offset[:, None, None, None]
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        pairs = zip(held, parts, strict=True)
        return tuple(mx.put_along_axis(array, index, part, axis=2) for array, part in pairs)

    def keys_and_values(self) -> tuple[Quantized, Quantized]:
        """The columns that can hold tokens."""
        return self._seen(self.keys), self._seen(self.values)

    def _seen(self, held: Quantized) -> Quantized:
        return tuple(array[:, :, : self._columns] for array in held)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Boolean [rows, 1, 1, columns]: up to the position, within `window_size` if given."""
        return columns_mask(self.offset, self._columns, window_size)

    def arrays(self) -> list[mx.array]:
        """Of the keys, then of the values."""
        return [*self.keys, *self.values]
