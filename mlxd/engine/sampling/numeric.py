"""Reductions over whole vocabularies, in the forms that MLX runs fast on a CPU.

There a reduction along a row runs at the latency of its additions, a select with
mixed outcomes at that of mispredicted branches, and exp is scalar. So rows of V
entries are summed as [128, V / 128] matrices, down their columns; steps are
clipped ramps; and exp is a polynomial. Kernels are compiled one by one: in a larger
graph MLX would recompute what is broadcast for every token. Each row's result
depends on that row alone, bit for bit, which a matrix product would not promise.
"""

from __future__ import annotations

import math

import mlx.core as mx

#: Rows of the matrix that a vocabulary is folded into.
FOLD = 128
#: Stands for minus infinity where infinity would give NaN.
LOWEST = -1e30
#: Makes a ramp a step: no two floats of a size that matters lie closer together.
STEEP = 2.0**60

_LOG2E = 1 / math.log(2)
#: Their sum is ln 2; n times the first is exact for every n that comes up.
_LN2_HIGH = 355 / 512
_LN2_LOW = math.log(2) - _LN2_HIGH


def padded(logits: mx.array) -> mx.array:
    """float32 logits, finite, filled up with impossible tokens to a multiple of FOLD."""
    logits = mx.maximum(logits.astype(mx.float32), LOWEST)
    missing = -logits.shape[-1] % FOLD
    if missing:
        logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=LOWEST)
    return logits


def folded(values: mx.array) -> mx.array:
    """[rows, V] as [rows, FOLD, V / FOLD]; V is a multiple of FOLD."""
    return values.reshape(values.shape[0], FOLD, -1)


def total(values: mx.array) -> mx.array:
    """Sum of each row, [rows, 1]."""
    return folded(values).sum(axis=1).sum(axis=-1, keepdims=True)


def best(values: mx.array) -> mx.array:
    """Maximum of each row, [rows, 1]."""
    return folded(values).max(axis=1).max(axis=-1, keepdims=True)


@mx.compile
def exp(values: mx.array) -> mx.array:
    """exp of values at or below 0; relative error below 1e-6, and 0 below about -87.

    2**n * exp(rest), with n rounded to nearest and the power built from its bits;
    n = -127 gives the bits of 0.
    """
    values = mx.maximum(values, -88.0)
    n = (values * _LOG2E - 0.5).astype(mx.int32)  # truncated towards 0
    whole = n.astype(mx.float32)
    rest = (values - whole * _LN2_HIGH) - whole * _LN2_LOW
    series = mx.array(1 / 720)
    for factorial in (120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        series = series * rest + 1 / factorial
    return series * mx.view((n + 127) * (1 << 23), mx.float32)


@mx.compile
def where_positive(values: mx.array, weights: mx.array) -> mx.array:
    """Weights in [0, 1] where a value is above 0, else 0; both [rows, V]."""
    return mx.minimum(weights, mx.maximum(values * STEEP, 0.0))


def inverse_cdf(weights: mx.array, number: mx.array, inside: mx.array) -> mx.array:
    """Draw an entry [rows, 1] of [rows, V] by two numbers in [0, 1).

    The first chooses a column of the folded matrix, the second an entry in it: with
    one for both, the last bits of all weights before an unlikely entry would decide
    about it, and the same draw would differ from one batch width to another.
    """
    matrix = folded(weights)
    column = crossing(matrix.sum(axis=1), number)
    row = crossing(mx.take_along_axis(matrix, column[:, :, None], axis=2)[:, :, 0], inside)
    return row * matrix.shape[2] + column


def crossing(weights: mx.array, number: mx.array) -> mx.array:
    """The entry [rows, 1] in which number * total falls; one that has weight, if any has."""
    cumulative = mx.cumsum(weights, axis=-1)
    place = (cumulative <= number * cumulative[:, -1:]).sum(axis=-1, keepdims=True)
    # Rounding can push the draw past the end: then the last entry that has weight.
    numbers = mx.arange(weights.shape[-1])[None]
    last = mx.where(weights > 0, numbers, 0).max(axis=-1, keepdims=True)
    return mx.minimum(place, last)
