"""The one seam into mlx-lm: attention as plain products, where MLX's fused form is slower.

MLX's fused attention takes an array mask badly on CUDA (19 ms for 32 layers, 64
rows and 1,024 columns, 4 ms as products), and on a CPU its softmax calls a scalar
exp. mlx-lm's model modules import one attention function from
`mlx_lm.models.base`; inside `seam` the modules of a model have this one in its
place, and nothing else of mlx-lm is touched. Which calls take the plain form is
decided by `applies`; all others go to the function that was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

Attention = Callable[..., mx.array]

_NAME = "scaled_dot_product_attention"


@contextmanager
def seam(model: nn.Module, choice: str) -> Iterator[int]:
    """Give the model's modules this file's attention; how many Python modules took it.

    With `choice` "fused" they keep mlx-lm's own.

    They are shared by all models of one architecture in a process, so that an
    engine enters this once, for its whole life.
    """
    modules = [] if choice == "fused" else _importers(model)
    for module in modules:
        setattr(module, _NAME, attention)
    try:
        yield len(modules)
    finally:
        for module in modules:
            setattr(module, _NAME, base.scaled_dot_product_attention)


def _importers(model: nn.Module) -> list[ModuleType]:
    """The Python modules of the model's parts that imported mlx-lm's attention."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [sys.modules[name] for name in sorted(names)]
    original = base.scaled_dot_product_attention
    return [module for module in modules if vars(module).get(_NAME) is original]


def attention(  # noqa: PLR0917  # mlx-lm's signature
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands for `mlx_lm.models.base.scaled_dot_product_attention`.

    Args:
        queries: [rows, heads, tokens, dim].
        keys, values: [rows, key heads, columns, dim]; heads is a multiple of key heads.
        mask: boolean or additive, broadcasting to [rows, heads, tokens, columns];
            "causal"; or None.

    Returns:
        [rows, heads, tokens, value dim], the values' dtype.
    """
    if sinks is None and not hasattr(cache, "bits") and applies(queries.shape[2], mask):
        return plain(queries, keys, values, scale, mask)
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )


def applies(tokens: int, mask: mx.array | str | None) -> bool:
    """Whether the plain form is the faster one on this device.

    On a CPU, always: MLX's fused attention is made of the same products there.
    On CUDA, for a step of the batch, which has an array mask. Metal's fused
    kernel takes masks.
    """
    if _on_cpu():
        return True
    return mx.cuda.is_available() and tokens == 1 and isinstance(mask, mx.array)


def plain(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Grouped product, softmax, product. Shapes as in `attention`."""
    rows, heads, tokens, dim = queries.shape
    groups = keys.shape[1]
    # One product for each key head: the queries of its group stand below each other.
    grouped = queries.reshape(rows, groups, heads // groups * tokens, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(rows, groups, -1, tokens, keys.shape[2])
    if mask is not None:
        scores = _masked(scores, mask, scale)
    weights, total = _softmax(scores, scale)
    weights = weights.reshape(rows, groups, -1, keys.shape[2]).astype(values.dtype)
    out = (weights @ values).reshape(rows, heads, tokens, values.shape[3])
    return out if total is None else out / total.reshape(rows, heads, tokens, 1)


def _masked(scores: mx.array, mask: mx.array | str, scale: float) -> mx.array:
    """Scores [rows, groups, heads of a group, tokens, columns], before they are scaled."""
    _rows, groups, share, tokens, columns = scores.shape
    if isinstance(mask, str):
        ends = mx.arange(columns - tokens, columns)[:, None]
        visible = mx.arange(columns)[None] <= ends
    else:
        # To five dimensions: one mask for all heads, or one for each.
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        heads = (1, 1) if mask.shape[1] == 1 else (groups, share)
        visible = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
    if visible.dtype != mx.bool_:
        return scores + visible.astype(scores.dtype) / scale
    # A finite number: a row that sees nothing, of a free slot, must not become NaN.
    return mx.where(visible, scores, mx.finfo(scores.dtype).min)


def _softmax(scores: mx.array, scale: float) -> tuple[mx.array, mx.array | None]:
    """Softmax of scale * scores over the last axis: weights, and what they still have to be
    divided by, which is cheaper after the second product."""
    if not (_on_cpu() and scores.dtype == mx.float32):
        return mx.softmax(scores * scale, axis=-1, precise=True), None
    weights = _exp_scaled(scores - scores.max(axis=-1, keepdims=True), mx.array(scale))
    return weights, weights.sum(axis=-1)


# Compiled, since a compiler makes a loop of vectors of it and MLX's own exp is scalar on a CPU.
_exp_scaled = mx.compile(lambda depth, scale: mx.exp(depth * scale), shapeless=True)


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)
