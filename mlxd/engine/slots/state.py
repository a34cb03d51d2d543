"""Slots of recurrent and convolution state (`ArraysCache`): no columns, one state per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlxd.engine.slots.base import LayerSlots, LayerSpec

#: Shape and dtype of one row of an array.
Entry = tuple[tuple[int, ...], mx.Dtype]


@dataclass(frozen=True, slots=True)
class StateSpec(LayerSpec):
    """Arrays of fixed size, whatever the capacity. None where the model never writes one."""

    entries: tuple[Entry | None, ...]

    @classmethod
    def of(cls, cache: ArraysCache) -> StateSpec:
        """The layer's shapes, from a cache that has seen as many tokens as its arrays can hold."""
        return cls(tuple(None if a is None else (a.shape[1:], a.dtype) for a in _entries(cache)))

    @property
    def slots(self) -> type[LayerSlots]:
        """One state per row."""
        return StateSlots

    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """The arrays that the model writes."""
        return [entry for entry in self.entries if entry is not None]

    @property
    def longest_padded(self) -> float:
        """Padding would be taken up into the state."""
        return 0


class StateSlots(LayerSlots):
    """The arrays [rows, …] of one layer."""

    def join(self, slot: int, cache: ArraysCache, row: int, length: int) -> None:
        """Write the row's state.

        An array that is still shorter than it can be (the last few token ids, say)
        ends with the newest: zeros stand for what came before the first token.
        """
        written = [array for array in _entries(cache) if array is not None]
        for target, source in zip(self._arrays, written, strict=True):
            if source.shape[1:] == target.shape[1:]:
                target[slot] = source[row]
            else:
                target[slot] = 0
                target[slot, ..., -source.shape[-1] :] = source[row]

    def clear(self, slot: int) -> None:
        """Zeros, which is what mlx-lm's models start from."""
        for array in self._arrays:
            array[slot] = 0

    @staticmethod
    def bind(
        spec: StateSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> StateStep:
        """mlx-lm's own cache around the arrays; positions do not matter."""
        return StateStep(spec, arrays)


class StateStep(ArraysCache):
    """One step of one recurrent layer. Models ask for this very class, and replace its items."""

    def __init__(self, spec: StateSpec, arrays: Sequence[mx.array]) -> None:
        super().__init__(len(spec.entries))
        self._written = [i for i, entry in enumerate(spec.entries) if entry is not None]
        for index, array in zip(self._written, arrays, strict=True):
            self[index] = array

    def arrays(self) -> list[mx.array]:
        """The arrays that the model writes."""
        return [self[index] for index in self._written]


def _entries(cache: ArraysCache) -> list[mx.array | None]:
    entries: list[mx.array | None] = cache.state[0]
    return entries
