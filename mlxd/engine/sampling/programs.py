"""The programs that draw: narrow over a few candidates, wide over everything.

Filters apply in mlx-lm's order, with its definitions: top_p, min_p, XTC and top_k look
at the untempered distribution, XTC at what the two before it left, top_k at what XTC
left. Every varying number is an array with one entry per row, so that nothing is
compiled for a request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlxd.engine.sampling import numeric

#: Block lengths whose maxima lead to so many candidates: as measured, the fastest.
NARROW_BLOCKS = {64: 32, 1024: 8}

#: Halvings of the threshold searches. Their brackets are at most 28 and 128 nats wide,
#: so that what is left is below 3e-5 and 2e-6 nats.
MASS_STEPS = 20
COUNT_STEPS = 26
#: Tokens so many nats below the best one have no weight at any temperature up to 2.
DEEPEST = 127.0


class Columns(NamedTuple):
    """Settings as [rows, 1] arrays; `special` is [rows, tokens], filled up with -1."""

    number: mx.array  # in [0, 1): decides the draw
    inside: mx.array  # in [0, 1): decides the rest of the wide program's draw
    temperature: mx.array
    top_p: mx.array  # 1 = off
    log_min_p: mx.array  # -inf = off
    top_k: mx.array  # int32; 0 = off
    xtc: mx.array  # XTC's threshold; inf where it does not act this time
    special: mx.array  # int32: tokens that XTC leaves alone


class Filters(NamedTuple):
    """Which of its filters the wide program has to compute."""

    top_p: bool
    min_p: bool
    top_k: bool
    xtc: bool


def narrow(logits: mx.array, row: Columns, limit: int, *, nucleus: bool) -> mx.array:
    """Draw from the `limit` best tokens, for rows with 0 < top_k <= limit and no XTC.

    Args:
        logits: [rows, vocabulary].
        nucleus: whether a row has a top_p, which needs the mass of all tokens.

    Returns:
        uint32 [rows].
    """
    logits = numeric.padded(logits)
    values, candidates = top(logits, limit)
    if nucleus:
        mass = numeric.total(numeric.exp(logits - values[:, :1]))
    else:
        mass = mx.ones_like(row.number)
    return _narrow(values, candidates, mass, row)


@mx.compile
def _narrow(values: mx.array, candidates: mx.array, mass: mx.array, row: Columns) -> mx.array:
    # All three filters keep a prefix of the sorted candidates.
    keep = mx.arange(values.shape[-1])[None] < row.top_k
    keep = keep & (values >= values[:, :1] + row.log_min_p)
    keep = keep & _nucleus(values, mx.exp(values - values[:, :1]) / mass, row.top_p)
    weights = mx.where(keep, mx.exp((values - values[:, :1]) / row.temperature), 0)
    place = numeric.crossing(weights, row.number)
    return mx.take_along_axis(candidates, place, axis=-1)[:, 0].astype(mx.uint32)


def top(logits: mx.array, limit: int) -> tuple[mx.array, mx.array]:
    """The `limit` largest values [rows, limit], best first, and their indices.

    Args:
        logits: [rows, V] with V a multiple of FOLD.
    """
    return _top(limit)(logits)


@cache
def _top(limit: int) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """A token among the `limit` best lies in one of the `limit` blocks with the largest
    maxima, so only those blocks are partitioned. Blocks are columns."""
    block = NARROW_BLOCKS[limit]

    def program(logits: mx.array) -> tuple[mx.array, mx.array]:
        rows, vocab = logits.shape
        count = vocab // block
        if count <= 2 * limit:
            best = mx.argpartition(logits, vocab - limit, axis=-1)[:, vocab - limit :]
            values, index = mx.take_along_axis(logits, best, axis=-1), best
        else:
            blocks = logits.reshape(rows, block, count)
            maxima = blocks.max(axis=1)
            chosen = mx.argpartition(maxima, count - limit, axis=-1)[:, count - limit :]
            inside = mx.take_along_axis(blocks, chosen[:, None, :], axis=2).reshape(rows, -1)
            first = limit * (block - 1)
            best = mx.argpartition(inside, first, axis=-1)[:, first:]
            values = mx.take_along_axis(inside, best, axis=-1)
            column = mx.take_along_axis(chosen, best % limit, axis=-1)
            index = best // limit * count + column
        order = mx.argsort(-values, axis=-1)
        return (
            mx.take_along_axis(values, order, axis=-1),
            mx.take_along_axis(index, order, axis=-1),
        )

    return mx.compile(program)


def _nucleus(values: mx.array, probabilities: mx.array, top_p: mx.array) -> mx.array:
    """mlx-lm's top_p over candidates sorted best first: a token stays while the mass above
    it is below top_p, and so does every token that ties with the last that stays."""
    above = mx.cumsum(probabilities, axis=-1) - probabilities
    stays = (above < top_p) | (top_p >= 1)
    last = mx.where(stays, values, mx.inf).min(axis=-1, keepdims=True)
    return values >= last


def wide(logits: mx.array, row: Columns, filters: Filters) -> mx.array:
    """Draw from all tokens.

    Args:
        logits: [rows, vocabulary].
        filters: what any row needs; the others' settings are neutral.

    Returns:
        uint32 [rows].
    """
    logits = numeric.padded(logits)
    # How far each token lies below the best one, in nats.
    depth = numeric.best(logits) - logits
    limit = -row.log_min_p
    if filters.top_p:
        limit = mx.minimum(limit, _depth_of_mass(depth, row.top_p))
    if filters.xtc:
        depth = _without_the_best(depth, limit, row)
    if filters.top_k:
        limit = mx.minimum(limit, _depth_of_count(depth, row.top_k))
    weights = numeric.exp(depth * (-1 / row.temperature))
    if filters.top_p or filters.min_p or filters.top_k:
        weights = numeric.where_positive(_above(limit) - depth, weights)
    return numeric.inverse_cdf(weights, row.number, row.inside)[:, 0].astype(mx.uint32)


def _above(limit: mx.array) -> mx.array:
    """A little more than the limit, which is to lie inside."""
    return limit * (1 + 2.0**-22) + 1e-6


def _depth_of_mass(depth: mx.array, top_p: mx.array) -> mx.array:
    """Smallest depth d such that the tokens within d of the best hold top_p of the mass.

    Tokens below (1 - top_p) / vocabulary cannot hold 1 - top_p together, which
    bounds the search.
    """
    mass = numeric.exp(-depth)
    wanted = top_p * numeric.total(mass)
    low = mx.full(wanted.shape, -1.0)
    high = mx.log(depth.shape[-1] / mx.maximum(1 - top_p, 1e-7)) + 1
    for _ in range(MASS_STEPS):
        middle = (low + high) * 0.5
        enough = numeric.total(numeric.where_positive(middle - depth, mass)) >= wanted
        low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
    return mx.where(top_p >= 1, mx.inf, high)


def _depth_of_count(depth: mx.array, top_k: mx.array) -> mx.array:
    """Smallest depth d such that top_k tokens lie within d of the best one."""
    low = mx.full(top_k.shape, -1.0)
    high = mx.full(top_k.shape, DEEPEST)
    for _ in range(COUNT_STEPS):
        middle = (low + high) * 0.5
        enough = (depth <= middle).sum(axis=-1, keepdims=True) >= top_k
        low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
    return mx.where(top_k > 0, high, mx.inf)


def _without_the_best(depth: mx.array, limit: mx.array, row: Columns) -> mx.array:
    """XTC: of the tokens whose probability is above the threshold, only the least stays.

    Removed tokens get an infinite depth. Probabilities are of what top_p and min_p
    left, `depth <= limit`; special tokens stay.
    """
    mass = mx.where(depth <= limit, numeric.exp(-depth), 0)
    above = mass > row.xtc * numeric.total(mass)
    least = mx.where(above, depth, -mx.inf).max(axis=-1, keepdims=True)
    left = mx.where(depth < least, -numeric.LOWEST, depth)
    index = mx.maximum(row.special, 0)
    own = mx.take_along_axis(depth, index, axis=-1)
    kept = mx.where(row.special >= 0, own, -numeric.LOWEST)
    return left.at[mx.arange(left.shape[0])[:, None], index].minimum(kept)
