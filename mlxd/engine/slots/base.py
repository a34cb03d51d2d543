"""What every slot class offers to the pool, and every step cache to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's state, apart from the number of rows and columns."""

    slots: type[LayerSlots]
    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None  # None = full attention

    def columns(self, capacity: int) -> int:
        """Columns that a row takes in a pool of this capacity."""
        return capacity if self.window is None else self.window

    def row_bytes(self, capacity: int) -> int:
        """Bytes of one slot in a pool of this capacity."""
        width = self.key_dim + self.value_dim
        return self.heads * self.columns(capacity) * width * self.dtype.size


class StepCache(Protocol):
    """Stands for mlx-lm's cache of one layer during one decode step of all rows.

    Row r writes at its own position; `offset` is the array of positions, which
    mlx-lm's rotary embeddings accept.
    """

    offset: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one column per row, [rows, heads, 1, dim]; return what attention reads."""
        ...

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What attention reads, for layers that share another layer's state."""
        ...

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Boolean mask [rows, 1, 1, columns] of the columns each row may see."""
        ...

    def arrays(self) -> list[mx.array]:
        """The layer's arrays after the step."""
        ...


class LayerSlots(Protocol):
    """One layer's arrays for all slots of a pool.

    Columns past a row's position hold whatever was there before; masks keep
    them from being read, so leaving needs no write.
    """

    def __init__(self, spec: LayerSpec, rows: int, capacity: int) -> None:
        """Zeroed arrays for `rows` slots of `capacity` columns."""

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write a finished prefill's state into a slot.

        Args:
            cache: mlx-lm's cache of this layer, after the prefill.
            row: which row of the cache's batch.
            length: tokens of that row; later ones are right padding.
        """
        ...

    def move(self, slot: int, source: Any, source_slot: int) -> None:
        """Copy one row from a pool of the same or a smaller capacity."""
        ...

    def resize(self, rows: int) -> None:
        """Keep the first min(old, new) slots in arrays of `rows` slots."""
        ...

    def arrays(self) -> list[mx.array]:
        """The arrays, in the order that `bind` and `adopt` take them."""
        ...

    def adopt(self, arrays: list[mx.array]) -> None:
        """Take over the arrays that a step returned; the old ones were consumed."""
        ...

    @staticmethod
    def bind(
        spec: LayerSpec, arrays: list[mx.array], positions: mx.array, columns: int
    ) -> StepCache:
        """A step cache over these arrays.

        Args:
            positions: int32 [rows], where each row writes.
            columns: every row's position is below it; columns at or beyond it
                are neither read nor masked, which is what keeps a step's cost
                independent of the pool's capacity.
        """
        ...
