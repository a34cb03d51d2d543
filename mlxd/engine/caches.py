"""The one place that makes a model's empty prompt caches, for both lanes.

With quantised KV the layers of full attention have mlx-lm's own quantised cache
from their first token on; windows and recurrent state stay as the model has them.
"""

from __future__ import annotations

from typing import Any

from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

#: Numbers that share one scale and one bias.
GROUP_SIZE = 64

#: What models raise on a cache that they do not expect.
REFUSALS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)


def make_caches(model: nn.Module, kv_bits: int) -> list[Any]:
    """Empty caches, one per layer.

    Args:
        kv_bits: bits of a number in keys and values of full attention; 0 = as computed.
    """
    caches: list[Any] = make_prompt_cache(model)
    return [_quantised(cache, kv_bits) for cache in caches] if kv_bits else caches


def _quantised(cache: Any, bits: int) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_quantised(part, bits) for part in cache.caches))
    # Exact: a class of a model's own may hold its state differently.
    return cache.to_quantized(GROUP_SIZE, bits) if type(cache) is KVCache else cache


def why_not_quantised(caches: list[Any]) -> str | None:
    """What about these caches makes quantised KV impossible, or None.

    Args:
        caches: the model's own, after a call.
    """
    full = _full(caches)
    if not full:
        return "no layer has full attention"
    sizes = sorted({array.shape[-1] for cache in full for array in cache.state[:2]})
    odd = [size for size in sizes if size % GROUP_SIZE]
    if odd:
        return f"heads of {odd[0]} numbers; groups of {GROUP_SIZE} are quantised"
    return None


def _full(caches: Any) -> list[KVCache]:
    """The caches of full attention, those in lists included."""
    found: list[KVCache] = []
    for cache in caches:
        if type(cache) is CacheList:
            found += _full(cache.caches)
        elif type(cache) is KVCache and not cache.empty():
            found.append(cache)
    return found
