"""Slots: how a batch's state is held. One class per mlx-lm cache class.

A *slot* is one row's share of preallocated arrays; a row joins by one write
and leaves by forgetting its slot. `layout_of` says which class holds which
layer of a model, or that a layer's cache has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxd.engine.slots.base import ColumnSpec, LayerSlots, LayerSpec, StepCache
from mlxd.engine.slots.full import FullSlots, FullSpec
from mlxd.engine.slots.group import GroupSpec
from mlxd.engine.slots.quantized import QuantizedSpec
from mlxd.engine.slots.ring import RingSpec
from mlxd.engine.slots.state import StateSpec

__all__ = [
    "ColumnSpec",
    "FullSlots",
    "FullSpec",
    "GroupSpec",
    "LayerSlots",
    "LayerSpec",
    "QuantizedSpec",
    "RingSpec",
    "StateSpec",
    "StepCache",
    "layout_of",
]

_SPECS: dict[type, Callable[[Any], LayerSpec]] = {
    KVCache: FullSpec.of,
    RotatingKVCache: RingSpec.of,
    QuantizedKVCache: QuantizedSpec.of,
    ArraysCache: StateSpec.of,
}


def layout_of(caches: Sequence[Any]) -> list[LayerSpec] | None:
    """What a model's layers need, read from caches that have seen some tokens.

    Args:
        caches: the model's own prompt cache after a call with several
            tokens, one entry per layer.

    Returns:
        One spec per layer, or None where a layer's cache has no slot class.
        Exact types count: a subclass may hold its state differently.
    """
    layout: list[LayerSpec] = []
    for cache in caches:
        if type(cache) is CacheList:
            parts = layout_of(cache.caches)
            if parts is None:
                return None
            layout.append(GroupSpec(tuple(parts)))
        elif type(cache) in _SPECS:
            layout.append(_SPECS[type(cache)](cache))
        else:
            return None
    return layout
