"""Slots of sliding-window layers (`RotatingKVCache`, keep 0): column = position mod window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxd.engine.slots.base import LayerSpec
from mlxd.engine.slots.full import FullSlots, FullStep


class RingSlots(FullSlots):
    """Keys and values [rows, heads, window, dim] of one layer; the pool's capacity is no matter."""

    @classmethod
    def spec(cls, cache: Any) -> LayerSpec:
        """The layer's shape, from a `RotatingKVCache` that holds at least one token."""
        keys, values, _offset, _keep, window, _index = cache.state
        return LayerSpec(cls, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window)

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write the row's last `window` tokens.

        Right padding is only possible where nothing rotated: all of the
        batch's tokens fit in the window.
        """
        keys, values, offset, _keep, window, index = cache.state
        if length < offset:
            if offset > window:
                raise ValueError("a padded row cannot be read from a rotated cache")
            offset = length
        for target, source in ((self.keys, keys), (self.values, values)):
            self._write(target, slot, _last(source[row], offset, window, index), offset)

    @staticmethod
    def _write(target: mx.array, slot: int, tokens: mx.array, offset: int) -> None:
        """Put tokens [heads, n, dim] that end at position `offset` - 1 into their columns."""
        window, count = target.shape[2], tokens.shape[1]
        first = (offset - count) % window
        head = min(count, window - first)
        target[slot, :, first : first + head] = tokens[:, :head]
        if head < count:
            target[slot, :, : count - head] = tokens[:, head:]

    @staticmethod
    def bind(
        spec: LayerSpec, arrays: list[mx.array], positions: mx.array, columns: int
    ) -> RingStep:
        """A step over the ring, or over its first columns while no row has filled more."""
        return RingStep(arrays[0], arrays[1], positions, columns)


def _last(state: mx.array, offset: int, window: int, index: int) -> mx.array:
    """The last min(offset, window) tokens of [heads, n, dim], oldest first.

    `RotatingKVCache` holds them in temporal order after a call with several
    tokens (then `index` is n and there may be more than a window of them), and
    rotated at `index` after a call with one.
    """
    count = min(offset, window)
    if offset < window or index == state.shape[1]:
        end = min(offset, index)
        return state[:, end - count : end]
    return mx.concatenate([state[:, index:], state[:, :index]], axis=1)


class RingStep(FullStep):
    """One decode step of one sliding-window layer."""

    def __init__(self, keys: mx.array, values: mx.array, positions: mx.array, columns: int) -> None:
        super().__init__(keys, values, positions, columns)
        self._window = keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, 1, dim] over each row's oldest column."""
        index = (self.offset % self._window)[:, None, None, None]
        self._keys = mx.put_along_axis(self._keys, index, keys, axis=2)
        self._values = mx.put_along_axis(self._values, index, values, axis=2)
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Columns that hold one of the row's last tokens, at most `window_size` of them."""
        columns = mx.arange(self._columns)[None]
        age = (self.offset[:, None] - columns) % self._window
        visible = age <= self.offset[:, None]
        if window_size is not None and window_size < self._window:
            visible = visible & (age < window_size)
        return visible[:, None, None, :]
