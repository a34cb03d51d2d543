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
from mlx_lm.models.cache import make_prompt_cache

#: Prompts are prefilled together when the shortest is at least this share of the
#: longest: padding is computed for nothing.
FULLEST = 0.75


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..stop of one row's prompt. The first chunk starts at 0."""

    row: int
    tokens: Sequence[int]
    start: int
    last: bool  # no chunk follows


@dataclass(slots=True)
class Prefilled:
    """A row's finished or growing state: one row of a batch of mlx-lm caches."""

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


def groups(chunks: Sequence[Chunk], longest_padded: int) -> list[list[Chunk]]:
    """Which chunks run in one call.

    Whole prompts of similar length run together, right-padded: padding stands
    behind a row's tokens, where causal attention never looks, and is cut off
    when the row joins.

    Args:
        longest_padded: a padded prompt may have at most this many tokens (a
            sliding window would rotate real tokens out), 0 = never pad.
    """
    whole = [c for c in chunks if c.start == 0 and c.last and len(c.tokens) <= longest_padded]
    result = [[c] for c in chunks if c not in whole]
    for chunk in sorted(whole, key=lambda c: -len(c.tokens)):
        group = result[-1] if result and result[-1][0] in whole else None
        if group is not None and len(chunk.tokens) >= FULLEST * len(group[0].tokens):
            group.append(chunk)
        else:
            result.append([chunk])
    return result


def run(model: nn.Module, group: Sequence[Chunk], state: Prefilled | None) -> list[Prefilled]:
    """Enqueue one call over the group; its arrays are computed asynchronously.

    Args:
        state: the row's state so far, for a group of one chunk; else None.

    Returns:
        One state per chunk of the group, in order.
    """
    caches = make_prompt_cache(model) if state is None else state.caches
    width = max(len(chunk.tokens) for chunk in group)
    padded = [list(chunk.tokens) + [0] * (width - len(chunk.tokens)) for chunk in group]
    model(mx.array(padded), cache=caches)
    mx.async_eval(arrays_of(caches))
    return [
        Prefilled(caches, index, chunk.start + len(chunk.tokens))
        for index, chunk in enumerate(group)
    ]
