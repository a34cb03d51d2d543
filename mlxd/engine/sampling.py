"""Vectorised sampling: every row has its own parameters, all rows share a few calls.

Filters apply in mlx-lm's order (top_p, min_p, top_k, then temperature), with
its definitions: the first three look at the untempered distribution. A row's
draw depends on (seed, position) only, never on its neighbours.

Three programs, chosen on the host from the rows' own settings:

* greedy: temperature 0; the argmax.
* narrow: a top_k up to 1,024; exact on the top candidates.
* wide: everything else; a threshold search over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxd.wire import Sampling

Program = Literal["greedy", "narrow", "wide"]
#: A compiled program: logits [rows, vocabulary], draws and settings [rows, 1] to tokens [rows].
Draw = Callable[[mx.array, mx.array, list[mx.array]], mx.array]

#: Candidates that the narrow program may look at, and the length of the blocks whose
#: maxima lead to them; each is compiled once.
NARROW_BLOCKS = {64: 128, 1024: 16}
NARROW_LIMITS = tuple(NARROW_BLOCKS)

#: Halvings of the wide program's threshold search. Its bracket starts at most
#: 2**6 nats wide, so the last one is finer than a float32 logit's own precision.
SEARCH_STEPS = 24

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014), on 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only; 24 bits, exact in float32.

    SplitMix64 as a counter-based generator. The seed is mixed first, so that
    neighbouring seeds do not give shifted copies of one stream.
    """
    state = (_mix(seed & _MASK64) + (position + 1) * _GOLDEN) & _MASK64
    return float((_mix(state) >> 40) * 2.0**-24)


@dataclass(frozen=True, slots=True)
class RowSampler:
    """One row's settings, with the program that they need."""

    settings: Sampling
    program: Program

    @classmethod
    def of(cls, settings: Sampling, vocab_size: int) -> RowSampler:
        """Choose the program. A `top_k` at or above the vocabulary is off."""
        top_k = settings.top_k if settings.top_k < vocab_size else 0
        program: Program = "wide"
        # As the programs see it: a temperature below float32's smallest is 0.
        if np.float32(settings.temperature) == 0 or top_k == 1:
            program = "greedy"
        elif 0 < top_k <= NARROW_LIMITS[-1] and vocab_size > NARROW_LIMITS[-1]:
            program = "narrow"
        return cls(settings, program)

    def draw(self, position: int) -> float:
        """The number that decides the token at this position of the row's sequence."""
        return 0.0 if self.program == "greedy" else uniform(self.settings.seed, position)


def sample(logits: mx.array, rows: Sequence[RowSampler | None], draws: Sequence[float]) -> mx.array:
    """Draw one token per row.

    Args:
        logits: [rows, vocabulary]; log-probabilities do as well.
        rows: a sampler per row; None where the slot is free (its token is the argmax).
        draws: a number in [0, 1) per row, that decides its draw.

    Returns:
        uint32 [rows].
    """
    tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
    for program in ("narrow", "wide"):
        chosen = [
            (index, row.settings, draw)
            for index, (row, draw) in enumerate(zip(rows, draws, strict=True))
            if row is not None and row.program == program
        ]
        if chosen:
            tokens = _draw(logits, tokens, program, chosen)
    return tokens


def _draw(
    logits: mx.array,
    tokens: mx.array,
    program: str,
    chosen: list[tuple[int, Sampling, float]],
) -> mx.array:
    """Replace the tokens of the chosen rows by draws of one program."""
    count, total = len(chosen), logits.shape[0]
    # A few row counts only, so that a few shapes are compiled.
    padded = min(1 << (count - 1).bit_length(), total)
    chosen = chosen + [chosen[-1]] * (padded - count)
    settings = [settings for _index, settings, _draw in chosen]
    index = mx.array([index for index, _settings, _draw in chosen])
    draws = mx.array([[draw] for _index, _settings, draw in chosen])
    subset = logits if padded == total and count == total else logits[index]
    columns = _columns(settings)
    if program == "narrow":
        limit = next(n for n in NARROW_LIMITS if n >= max(s.top_k for s in settings))
        picked = _narrow(limit, _needs_mass(settings))(subset, draws, columns)
    else:
        filtered = _needs_mass(settings) or any(s.min_p > 0 for s in settings)
        counted = any(0 < s.top_k < logits.shape[1] for s in settings)
        picked = _wide(filtered, counted)(subset, draws, columns)
    # The padding repeats the last row, with the same draw: the same token twice.
    return mx.put_along_axis(tokens, index, picked, axis=0)


def _needs_mass(settings: Sequence[Sampling]) -> bool:
    return any(s.top_p < 1 for s in settings)


def _columns(settings: Sequence[Sampling]) -> list[mx.array]:
    """temperature, top_p, log(min_p), top_k as [rows, 1] arrays."""
    table = np.array(
        [
            (s.temperature, s.top_p, math.log(s.min_p) if s.min_p > 0 else -math.inf, s.top_k)
            for s in settings
        ],
        dtype=np.float32,
    )
    temperature, top_p, log_min_p, top_k = np.split(table, 4, axis=1)
    return [mx.array(a) for a in (temperature, top_p, log_min_p, top_k.astype(np.int32))]


@cache
def _narrow(limit: int, needs_mass: bool) -> Draw:
    """The narrow program over `limit` candidates; `needs_mass` where a row has a top_p."""

    def program(logits: mx.array, draw: mx.array, settings: list[mx.array]) -> mx.array:
        temperature, top_p, log_min_p, top_k = settings
        values, candidates = _candidates(logits, limit)
        order = mx.argsort(-values, axis=-1)
        candidates = mx.take_along_axis(candidates, order, axis=-1)
        values = mx.take_along_axis(values, order, axis=-1).astype(mx.float32)
        # All three filters keep a prefix of the sorted candidates.
        keep = (mx.arange(limit)[None] < top_k) & (values >= values[:, :1] + log_min_p)
        if needs_mass:
            logits = logits.astype(mx.float32)
            total = _exp(logits - values[:, :1]).sum(axis=-1, keepdims=True)
            keep = keep & _nucleus(values, mx.exp(values - values[:, :1]) / total, top_p)
        weights = mx.where(keep, mx.exp((values - values[:, :1]) / temperature), 0)
        place = _inverse_cdf(weights, draw)
        place = mx.minimum(place, keep.sum(axis=-1, keepdims=True) - 1)
        return mx.take_along_axis(candidates, place, axis=-1)[:, 0].astype(mx.uint32)

    return mx.compile(program)


def _exp(values: mx.array) -> mx.array:
    """exp of values at or below 0, over a whole vocabulary; relative error below 1e-4.

    MLX's exp on a CPU is scalar and took 10 ms for 16 rows of 49,152; this takes
    2.6, and is as accurate as a float32 sum of so many terms. Taylor's series at
    x / 64, squared six times; what is smaller than e**-40 is 0.
    """
    x = mx.maximum(values, -40.0) / 64
    series = 1 + x / 7
    for degree in range(6, 0, -1):
        series = 1 + x / degree * series
    for _ in range(6):
        series = series * series
    return mx.where(values < -40.0, 0, series)


def _candidates(logits: mx.array, limit: int) -> tuple[mx.array, mx.array]:
    """The `limit` largest values [rows, limit] and their indices, in no order.

    A token among the `limit` best lies in one of the `limit` blocks with the
    largest maxima, so only those blocks are partitioned; 3 times faster than
    partitioning the vocabulary.
    """
    rows, vocab = logits.shape
    block = NARROW_BLOCKS[limit]
    count = -(-vocab // block)
    if count <= 2 * limit:
        best = mx.argpartition(logits, vocab - limit, axis=-1)[:, vocab - limit :]
        return mx.take_along_axis(logits, best, axis=-1), best
    if count * block != vocab:
        logits = mx.pad(logits, [(0, 0), (0, count * block - vocab)], constant_values=-mx.inf)
    blocks = logits.reshape(rows, count, block)
    chosen = mx.argpartition(blocks.max(axis=-1), count - limit, axis=-1)[:, count - limit :]
    inside = mx.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, limit * block)
    best = mx.argpartition(inside, limit * (block - 1), axis=-1)[:, limit * (block - 1) :]
    index = mx.take_along_axis(chosen, best // block, axis=-1) * block + best % block
    return mx.take_along_axis(inside, best, axis=-1), index


def _nucleus(values: mx.array, probabilities: mx.array, top_p: mx.array) -> mx.array:
    """mlx-lm's top_p over candidates sorted best first: a token stays while the mass above
    it is below top_p, and so does every token that ties with the last that stays."""
    above = mx.cumsum(probabilities, axis=-1) - probabilities
    stays = (above < top_p) | (top_p >= 1)
    last = mx.where(stays, values, mx.inf).min(axis=-1, keepdims=True)
    return values >= last


def _inverse_cdf(weights: mx.array, draw: mx.array) -> mx.array:
    """Index [rows, 1] of the entry in which draw * total falls."""
    cumulative = mx.cumsum(weights, axis=-1)
    return (cumulative <= draw * cumulative[:, -1:]).sum(axis=-1, keepdims=True)


@cache
def _wide(filtered: bool, counted: bool) -> Draw:
    """The wide program; `filtered` where a row has top_p or min_p, `counted` where it has top_k."""

    def program(logits: mx.array, draw: mx.array, settings: list[mx.array]) -> mx.array:
        temperature, top_p, log_min_p, top_k = settings
        logits = logits.astype(mx.float32)
        # How far each token lies below the best one, in nats.
        depth = logits.max(axis=-1, keepdims=True) - logits
        weights = _exp(depth / -temperature)
        if filtered or counted:
            limit = -log_min_p
            if filtered:
                limit = mx.minimum(limit, _depth_of_mass(depth, top_p))
            if counted:
                limit = mx.minimum(limit, _depth_of_count(depth, top_k))
            weights = mx.where(depth <= limit, weights, 0)
        place = _inverse_cdf(weights, draw)
        # Rounding can push the draw past the end: then the last token that has weight.
        numbers = mx.arange(weights.shape[-1])[None]
        last = mx.where(weights > 0, numbers, 0).max(axis=-1, keepdims=True)
        return mx.minimum(place, last)[:, 0].astype(mx.uint32)

    return mx.compile(program)


def _depth_of_mass(depth: mx.array, top_p: mx.array) -> mx.array:
    """Smallest depth d such that the tokens within d of the best hold top_p of the mass.

    Tokens below (1 - top_p) / vocabulary cannot hold 1 - top_p together, which
    bounds the search.
    """
    mass = _exp(-depth)
    wanted = top_p * mass.sum(axis=-1, keepdims=True)
    low = mx.full(wanted.shape, -1.0)
    high = mx.full(wanted.shape, 63.0)
    for _ in range(SEARCH_STEPS):
        middle = (low + high) * 0.5
        enough = mx.where(depth <= middle, mass, 0).sum(axis=-1, keepdims=True) >= wanted
        low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
    return mx.where(top_p >= 1, mx.inf, high)


def _depth_of_count(depth: mx.array, top_k: mx.array) -> mx.array:
    """Smallest depth d such that top_k tokens lie within d of the best one."""
    low = mx.full(top_k.shape, -1.0)
    high = depth.max(axis=-1, keepdims=True)
    for _ in range(SEARCH_STEPS):
        middle = (low + high) * 0.5
        enough = (depth <= middle).sum(axis=-1, keepdims=True) >= top_k
        low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
    return mx.where(top_k > 0, high, mx.inf)
