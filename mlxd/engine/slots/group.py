"""Slots of layers that hold several caches (`CacheList`): the slots of each, together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx

from mlxd.engine.slots.base import LayerSlots, LayerSpec, StepCache


@dataclass(frozen=True, slots=True)
class GroupSpec(LayerSpec):
    """The specs of the caches, in order."""

    parts: tuple[LayerSpec, ...]

    @property
    def slots(self) -> type[LayerSlots]:
        """All of them together."""
        return GroupSlots

    def shapes(self, capacity: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Of each part in turn."""
        return [shape for part in self.parts for shape in part.shapes(capacity)]

    @property
    def longest_padded(self) -> float:
        """The least that a part allows."""
        return min(part.longest_padded for part in self.parts)


class GroupSlots(LayerSlots):
    """Slots of every cache in the list."""

    def __init__(self, spec: GroupSpec, rows: int, capacity: int) -> None:
        self._parts = [part.slots(part, rows, capacity) for part in spec.parts]

    def join(self, slot: int, cache: Any, row: int, length: int) -> None:
        """Write each part."""
        for part, inner in zip(self._parts, cache.caches, strict=True):
            part.join(slot, inner, row, length)

    def clear(self, slot: int) -> None:
        """Clear each part."""
        for part in self._parts:
            part.clear(slot)

    def move(self, slot: int, source: GroupSlots, source_slot: int) -> None:
        """Copy each part."""
        for part, other in zip(self._parts, source.parts, strict=True):
            part.move(slot, other, source_slot)

    @property
    def parts(self) -> list[LayerSlots]:
        """The slots of each cache."""
        return self._parts

    def resize(self, rows: int) -> None:
        """Resize each part."""
        for part in self._parts:
            part.resize(rows)

    def arrays(self) -> list[mx.array]:
        """Of each part in turn."""
        return [array for part in self._parts for array in part.arrays()]

    def adopt(self, arrays: Sequence[mx.array]) -> None:
        """Give each part its own."""
        rest = iter(arrays)
        for part in self._parts:
            part.adopt(list(islice(rest, len(part.arrays()))))

    @staticmethod
    def bind(
        spec: GroupSpec, arrays: Sequence[mx.array], positions: mx.array, columns: int
    ) -> GroupStep:
        """A step of each part."""
        rest = iter(arrays)
        return GroupStep(
            [
                part.slots.bind(part, list(islice(rest, len(part.shapes(1)))), positions, columns)
                for part in spec.parts
            ]
        )


class GroupStep:
    """One decode step of one layer: a step cache in each place of the list."""

    def __init__(self, caches: Sequence[StepCache]) -> None:
        self.caches = caches

    def __getitem__(self, index: int) -> StepCache:
        """The step cache that stands for the list's cache of this index."""
        return self.caches[index]

    def arrays(self) -> list[mx.array]:
        """Of each part in turn."""
        return [array for cache in self.caches for array in cache.arrays()]
