"""Prefill: computing the state of prompts, in chunks, before their rows join a pool.

State is built in mlx-lm's own caches, so that every cache class works, and the
head is never evaluated: MLX is lazy and nothing asks for these logits. A row's
last prompt token is not prefilled; it is the first token that the row feeds to
the shared decode step, which gives the row its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxd.engine.port import Chunk

#: Prompts are prefilled together when the shortest is at least this share of the
#: longest: padding is computed for nothing.
FULLEST = 0.75


@dataclass(slots=True)
class Prefilled:
    """A row's finished or growing state: one row of a batch of mlx-lm caches.

    Attributes:
        length: tokens of the row; the caches may hold padding behind them.
    """

    caches: list[Any]
    row: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of this row's share."""
        total = sum(array.nbytes for array in arrays_of(self.caches))
        batch = next((a.shape[0] for a in arrays_of(self.caches)), 1)
        return total // batch


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array in the caches' public state."""
    states = [cache.state for cache in caches if not cache.empty()]
    leaves = cast("dict[str, Any]", tree_flatten(states, destination={}))
    return [leaf for leaf in leaves.values() if isinstance(leaf, mx.array)]


def groups(chunks: Sequence[Chunk], longest_padded: float, *, continued: bool) -> list[list[Chunk]]:
    """Which chunks run in one call.

    Last chunks of similar length that start at the same position run together,
    right-padded: padding stands behind a row's tokens, where causal attention
    never looks, and is cut off when the row joins. Equal ones need no padding.

    Args:
        longest_padded: a padded row may end at this position at most.
        continued: whether rows that have state already can be put together.
    """
    result: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, -len(chunk.tokens))):
        first = result[-1][0] if result else None
        if (
            first is not None
            and first.last
            and chunk.last
            and first.start == chunk.start
            and (first.start == 0 or continued)
            and _similar(len(first.tokens), len(chunk.tokens), longest_padded - first.start)
        ):
            result[-1].append(chunk)
        else:
            result.append([chunk])
    return result


def _similar(longest: int, tokens: int, longest_padded: float) -> bool:
    """Whether a chunk may be padded to the longest of a group."""
    return tokens == longest or (longest <= longest_padded and tokens >= FULLEST * longest)


def run(model: nn.Module, group: Sequence[Chunk], caches: list[Any]) -> list[Prefilled]:
    """Enqueue one call over the group; its arrays are computed asynchronously.

    Args:
        caches: the group's state so far, one row per chunk; updated in place.

    Returns:
        One state per chunk of the group, in order.
    """
    width = max(len(chunk.tokens) for chunk in group)
    padded = [list(chunk.tokens) + [0] * (width - len(chunk.tokens)) for chunk in group]
    model(mx.array(padded), cache=caches)
    mx.async_eval(arrays_of(caches))
    return [
        Prefilled(caches, index, chunk.start + len(chunk.tokens))
        for index, chunk in enumerate(group)
    ]
