"""One decode step's forward pass over the slots of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxd.engine.slots import LayerSpec

Arrays = list[list[mx.array]]  # of every layer
#: tokens [rung], positions [rung], arrays -> logits [rung, vocabulary], updated arrays
Forward = Callable[[mx.array, mx.array, Arrays], tuple[mx.array, Arrays]]


def forward(
    model: nn.Module, layout: Sequence[LayerSpec], vocab_size: int, columns: int
) -> Forward:
    """The pass that reads `columns` columns of every row; it can be compiled.

    Args:
        vocab_size: ids that the model knows. A head wider than the embedding
            could give a token that cannot be fed.
    """

    def step(tokens: mx.array, positions: mx.array, arrays: Arrays) -> tuple[mx.array, Arrays]:
        caches: list[Any] = [
            spec.slots.bind(spec, layer, positions, columns)
            for spec, layer in zip(layout, arrays, strict=True)
        ]
        logits = model(tokens[:, None], cache=caches)
        return logits[:, -1, :vocab_size], [cache.arrays() for cache in caches]

    return step
