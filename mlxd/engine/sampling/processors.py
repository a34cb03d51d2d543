"""Bias and penalties: mlx-lm's logits processors, for all rows of a pool at once.

In mlx-lm's order (bias, repetition, presence, frequency), with its definitions: the
penalties look at a row's last tokens, its prompt's included; repetition and presence
count a token once, frequency as often as it stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxd.engine.sampling.ragged import ragged
from mlxd.engine.sampling.rows import RowSampler
from mlxd.wire import Sampling

#: What a free slot counts as.
_NEUTRAL = Sampling(seed=0)
_SMALLEST_BIAS = 16


def process(
    logits: mx.array,
    history: mx.array,
    rows: Sequence[RowSampler | None],
    lengths: Sequence[int],
) -> mx.array:
    """Logits with bias and penalties; as they are where no row has any.

    Nothing here is compiled: the work is on a few entries, so there is nothing to
    fuse, and no new width ever waits for a compiler.

    Args:
        logits: [rows, vocabulary].
        history: uint32 [rows, tokens], each row's last tokens, newest last; as wide as
            the longest `window` of these rows, or wider.
        rows: None where the slot is free.
        lengths: how many tokens each row has; what stands before them in its history
            is not looked at.

    Returns:
        [rows, vocabulary], float32 where something was done.
    """
    settings = [_NEUTRAL if row is None else row.settings for row in rows]
    if any(s.logit_bias for s in settings):
        logits = _biased(logits.astype(mx.float32), settings)
    if not any(row is not None and row.window for row in rows):
        return logits
    logits = logits.astype(mx.float32)
    repetition = [s.repetition_penalty for s in settings]
    if any(penalty != 1 for penalty in repetition):
        seen = _seen(history, [s.repetition_context_size for s in settings], lengths)
        logits = _once(logits, history, seen, _column(repetition), _repetition)
    presence = [s.presence_penalty for s in settings]
    if any(presence):
        seen = _seen(history, [s.presence_context_size for s in settings], lengths)
        logits = _once(logits, history, seen, _column(presence), mx.subtract)
    frequency = [s.frequency_penalty for s in settings]
    if any(frequency):
        seen = _seen(history, [s.frequency_context_size for s in settings], lengths)
        penalties = mx.where(seen, _column(frequency), 0)
        logits = logits.at[_numbers(logits), history].subtract(penalties)
    return logits


def _biased(logits: mx.array, settings: Sequence[Sampling]) -> mx.array:
    """Add each row's bias; rows are filled up with a bias of 0 on token 0."""
    tokens = ragged([[*s.logit_bias] for s in settings], np.int32(0), smallest=_SMALLEST_BIAS)
    biases = ragged(
        [[*s.logit_bias.values()] for s in settings], np.float32(0), smallest=_SMALLEST_BIAS
    )
    return logits.at[_numbers(logits), mx.array(tokens)].add(mx.array(biases))


def _seen(history: mx.array, sizes: Sequence[int], lengths: Sequence[int]) -> mx.array:
    """Which entries of the history lie in each row's window, bool [rows, tokens]."""
    reach = np.minimum(np.array(sizes), np.array(lengths)).astype(np.int32)
    ages = mx.arange(history.shape[1] - 1, -1, -1)
    return ages[None] < mx.array(reach)[:, None]


def _once(
    logits: mx.array,
    history: mx.array,
    seen: mx.array,
    penalty: mx.array,
    apply: Callable[[mx.array, mx.array], mx.array],
) -> mx.array:
    """Penalise every token that was seen, however often.

    What was not seen is replaced by the newest token, which always was: several
    writes of one token are then equal.
    """
    targets = mx.where(seen, history, history[:, -1:])
    values = mx.take_along_axis(logits, targets, axis=-1)
    return mx.put_along_axis(logits, targets, apply(values, penalty), axis=-1)


def _repetition(values: mx.array, penalty: mx.array) -> mx.array:
    return mx.where(values < 0, values * penalty, values / penalty)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])


def _numbers(logits: mx.array) -> mx.array:
    """Row numbers, [rows, 1]."""
    return mx.arange(logits.shape[0])[:, None]
