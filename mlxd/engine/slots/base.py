"""What every slot class offers to the pool, and every step cache to a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LayerSpec(ABC):
    """What one layer's state looks like, apart from the number of rows. Equal layers are equal."""

    @property
    @abstractmethod
    def slots(self) -> type[LayerSlots]:
        """The class that holds such a layer."""

    @abstractmethod
    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shape and dtype of one row of each array, in a pool of this capacity."""

    @property
    def longest_padded(self) -> float:
        """The position up to which a prompt may be right-padded in prefill; 0 = not at all.

        Padding stands behind a row's tokens, where causal attention never looks.
        """
        return math.inf

    def row_bytes(self, capacity: int) -> int:
        """Bytes of one slot in a pool of this capacity."""
        return sum(math.prod(shape) * dtype.size for shape, dtype in self.shapes(capacity))


class ColumnSpec(LayerSpec):
    """A layer whose state is one column per token: any prefix of it is the prefix's state.

    Columns are axis 2 of each of its arrays.
    """

    @abstractmethod
    def columns(self, cache: Any) -> list[mx.array]:
        """The arrays [rows, heads, columns, …] of a cache of mlx-lm's that is not empty."""

    @abstractmethod
    def cache(self, arrays: Sequence[mx.array], length: int) -> Any:
        """A cache of mlx-lm's around such arrays, of which `length` columns hold tokens."""


class StepCache(Protocol):
    """Stands for mlx-lm's cache of one layer during one decode step of all rows.

    It has what a model uses of that cache class; `offset`, where there is one, is
    the int32 array [rows] of positions, which mlx-lm's rotary embeddings accept.
    """

    def arrays(self) -> list[mx.array]:
        """The layer's arrays after the step."""
        ...


class LayerSlots(ABC):
    """One layer's arrays [rows, …] for all slots of a pool.

    A step updates every slot, free ones and their garbage included: rows never
    see each other. Leaving needs no write; joining overwrites or hides what was there.
    """

    def __init__(self, spec: LayerSpec, rows: int, capacity: int) -> None:
        """Zeroed arrays for `rows` slots of `capacity` columns."""
        self._arrays = [mx.zeros((rows, *shape), dtype) for shape, dtype in spec.shapes(capacity)]

    @abstractmethod
    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write a finished prefill's state into a slot.

        Args:
            cache: mlx-lm's cache of this layer, after the prefill.
            row: which row of the cache's batch.
            length: tokens of that row; later ones are right padding.
        """

    def clear(self, slot: int) -> None:  # noqa: B027  # masks hide what columns held before
        """Make a slot the state of a row without tokens."""

    def move(self, slot: int, source: Any, source_slot: int) -> None:
        """Copy one row from the same layer of a pool of the same or a smaller capacity."""
        for target, array in zip(self._arrays, source.arrays(), strict=True):
            if target.shape[1:] == array.shape[1:]:
                target[slot] = array[source_slot]
            else:
                target[slot, :, : array.shape[2]] = array[source_slot]

    def resize(self, rows: int) -> None:
        """Copy into arrays of `rows` slots and evaluate, so that only one layer exists twice."""
        self._arrays = [resized(array, rows) for array in self._arrays]
        mx.eval(self._arrays)

    def arrays(self) -> list[mx.array]:
        """The arrays, in the order that `bind` and `adopt` take them."""
        return list(self._arrays)

    def adopt(self, arrays: Sequence[mx.array]) -> None:
        """Take over the arrays that a step returned; the old ones were consumed."""
        self._arrays = list(arrays)

    @staticmethod
    @abstractmethod
    def bind(spec: Any, arrays: Sequence[mx.array], positions: mx.array, columns: int) -> StepCache:
        """A step cache over these arrays.

        Args:
            spec: the layer's own.
            positions: int32 [rows], where each row writes.
            columns: every row's position is below it; columns at or beyond it
                are neither read nor masked, which is what keeps a step's cost
                independent of the pool's capacity.
        """


def resized(array: mx.array, rows: int) -> mx.array:
    """The first rows of `array`, or all of them and zeroed ones behind."""
    old = array.shape[0]
    if rows <= old:
        # A copy, so that the larger buffer can go.
        return mx.contiguous(array[:rows])
    padding = mx.zeros((rows - old, *array.shape[1:]), array.dtype)
    return mx.concatenate([array, padding], axis=0)
