"""A pool: the slots of one capacity class, at one width, that step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxd.engine.history import History
from mlxd.engine.slots import LayerSpec

#: Capacity classes are this far apart. A step reads only the columns in use, so
#: the classes bound memory, not time; every further class that is in use at the
#: same time costs another reading of the weights.
CLASS_FACTOR = 4
SMALLEST_CLASS = 512
SMALLEST_COLUMNS = 64


def capacity_classes(context: int, smallest: int = SMALLEST_CLASS) -> list[int]:
    """Capacities from the smallest class up to the context, the last one exact."""
    classes = []
    capacity = smallest
    while capacity < context:
        classes.append(capacity)
        capacity *= CLASS_FACTOR
    return [*classes, context]


def class_for(classes: Sequence[int], tokens: int) -> int:
    """The smallest class that holds so many tokens, or the largest there is."""
    return next((capacity for capacity in classes if capacity >= tokens), classes[-1])


def rungs(width: int) -> list[int]:
    """Widths that a pool can have: powers of two, then the configured width."""
    return sorted({rung_for(rows, width) for rows in range(1, width + 1)})


def rung_for(rows: int, width: int) -> int:
    """The narrowest width that a pool with this many rows has: a rung of the ladder.

    Rows that run on after `width` was made smaller keep a power of two.
    """
    power = 1 << max(rows - 1, 0).bit_length()
    return min(power, width) if rows <= width else power


def columns_for(length: int, capacity: int) -> int:
    """How many columns a step reads when the longest row has `length` tokens.

    Rounded up to an eighth of the next lower power of two (at least 64), so
    that rows share compiled shapes and at most an eighth is read in vain.
    """
    grain = max(SMALLEST_COLUMNS, (1 << (length.bit_length() - 1)) // 8)
    return min(-(-length // grain) * grain, capacity)


class Pool:
    """Slots 0..rung of one capacity; the lowest free slot is always taken first.

    The runner owns the pool; nothing else writes it. Rows are opaque here.
    """

    def __init__(self, layout: Sequence[LayerSpec], capacity: int, rung: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.layers = [spec.slots(spec, rung, capacity) for spec in layout]
        # The token that each slot feeds to the next step.
        self.tokens = mx.zeros((rung,), mx.uint32)
        self.history = History(rung)
        self._taken: set[int] = set()

    @property
    def rung(self) -> int:
        """Number of slots."""
        return self.tokens.shape[0]

    @property
    def live(self) -> int:
        """Number of taken slots."""
        return len(self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, taken or not."""
        rows = self.rung * sum(spec.row_bytes(self.capacity) for spec in self.layout)
        return rows + self.history.nbytes

    def take(self) -> int:
        """The lowest free slot. The pool must not be full."""
        slot = next(slot for slot in range(self.rung) if slot not in self._taken)
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. What it holds stays as it is, and nobody reads it."""
        self._taken.remove(slot)

    def join(self, slot: int, caches: Sequence[Any], row: int, length: int, token: int) -> None:
        """Write a prefilled row: its first `length` tokens' state, and the token to feed next."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.join(slot, cache, row, length)
        self.feed(slot, mx.array(token, mx.uint32))

    def clear(self, slot: int) -> None:
        """Make a slot the state of a row without tokens."""
        for layer in self.layers:
            layer.clear(slot)

    def feed(self, slot: int, token: mx.array) -> None:
        """Set the token that a slot feeds to the next step.

        A new array: the old one may be the result of a step that is yet to be read.
        """
        self.tokens = mx.where(mx.arange(self.rung) == slot, token, self.tokens)

    def move(self, slot: int, source: Pool, source_slot: int) -> None:
        """Copy one row from another pool, or from another slot of this one."""
        for layer, other in zip(self.layers, source.layers, strict=True):
            layer.move(slot, other, source_slot)
        self.history.move(slot, source.history, source_slot)
        self.feed(slot, source.tokens[source_slot])

    def resize(self, rung: int) -> None:
        """Change the width; taken slots must lie below the new one."""
        if any(slot >= rung for slot in self._taken):
            raise ValueError(f"a taken slot lies beyond rung {rung}")
        padding = mx.zeros((max(0, rung - self.rung),), mx.uint32)
        self.tokens = mx.concatenate([self.tokens[:rung], padding])
        self.history.resize(rung)
        for layer in self.layers:
            layer.resize(rung)

    def arrays(self) -> list[list[mx.array]]:
        """Every layer's arrays."""
        return [layer.arrays() for layer in self.layers]

    def adopt(self, arrays: list[list[mx.array]]) -> None:
        """Every layer's arrays as a step returned them."""
        for layer, updated in zip(self.layers, arrays, strict=True):
            layer.adopt(updated)
