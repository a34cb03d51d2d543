"""What the slots read of mlx-lm's caches is where it was: the public state of each class."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

HEADS, DIM, WINDOW = 2, 4, 8


def tokens(count: int) -> mx.array:
    """[1, HEADS, count, DIM], each column filled with its number."""
    column = mx.arange(count, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(column, (1, HEADS, count, DIM))


def numbers(array: mx.array) -> list[int]:
    """Which tokens stand in the columns of the first head."""
    return [int(value) for value in np.array(array[0, 0, :, 0])]


def test_a_full_cache_is_keys_values_offset_with_the_tokens_in_the_first_columns() -> None:
    """Further columns are room to grow."""
    cache = KVCache()
    assert cache.empty()
    cache.update_and_fetch(tokens(5), tokens(5))
    keys, values, offset = cache.state
    assert offset == 5
    assert not cache.empty()
    assert numbers(keys)[:5] == numbers(values)[:5] == [0, 1, 2, 3, 4]
    assert keys.shape[1:] == values.shape[1:]


def test_a_rotating_cache_is_in_temporal_order_after_several_tokens() -> None:
    """Keys, values, offset, keep, window, write index; it may hold more than a window."""
    cache = RotatingKVCache(max_size=WINDOW)
    cache.update_and_fetch(tokens(20), tokens(20))
    keys, _values, offset, keep, window, index = cache.state
    assert (offset, keep, window, index) == (20, 0, WINDOW, keys.shape[2])
    assert numbers(keys)[-WINDOW:] == list(range(12, 20))


def test_a_rotating_cache_is_rotated_at_its_index_after_one_token() -> None:
    """The oldest token stands at the write index."""
    cache = RotatingKVCache(max_size=WINDOW)
    cache.update_and_fetch(tokens(20), tokens(20))
    one = mx.full((1, HEADS, 1, DIM), 20.0)
    cache.update_and_fetch(one, one)
    keys, _values, offset, _keep, _window, index = cache.state
    assert offset == 21
    held = numbers(keys)
    assert held[index:] + held[:index] == list(range(13, 21))
