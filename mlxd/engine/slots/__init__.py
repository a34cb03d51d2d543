"""Slots: how a batch's state is held. One class per mlx-lm cache class.

A *slot* is one row's share of preallocated arrays; a row joins by one write
and leaves by forgetting its slot. `layout_of` says which class holds which
layer of a model, or that a layer's cache has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxd.engine.slots.base import LayerSlots, LayerSpec, StepCache
from mlxd.engine.slots.full import FullSlots
from mlxd.engine.slots.ring import RingSlots

__all__ = ["FullSlots", "LayerSlots", "LayerSpec", "RingSlots", "StepCache", "layout_of"]


def layout_of(caches: Sequence[Any]) -> list[LayerSpec] | None:
    """What a model's layers need, read from caches that have seen some tokens.

    Args:
        caches: the model's own prompt cache after a call with at least two
            tokens, one entry per layer.

    Returns:
        One spec per layer, or None where a layer's cache has no slot class.
        Exact types count: a subclass may hold its state differently.
    """
    layout = []
    for cache in caches:
        if type(cache) is KVCache:
            layout.append(FullSlots.spec(cache))
        elif type(cache) is RotatingKVCache and cache.state[3] == 0:
            layout.append(RingSlots.spec(cache))
        else:
            return None
    return layout
