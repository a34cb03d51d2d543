"""Log-probabilities of the rows that asked: after processors, before temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxd.engine.sampling import numeric
from mlxd.engine.sampling.programs import top
from mlxd.engine.sampling.rows import NARROW_LIMITS, RowSampler
from mlxd.wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Observed:
    """Log-probabilities on their way: what some rows of a pool asked for.

    Attributes:
        wanted: row -> how many of the best tokens, in the order of the arrays.
        chosen: float32 [rows that asked, 1].
        values, tokens: [rows that asked, candidates], best first.
    """

    wanted: dict[int, int]
    chosen: mx.array
    values: mx.array
    tokens: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated before `read`."""
        return [self.chosen, self.values, self.tokens]

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait, and give each row that asked its own."""
        chosen, values, tokens = (np.array(array) for array in self.arrays)
        return {
            row: TokenLogprobs(
                float(chosen[place, 0]),
                [
                    (token, value)
                    for token, value in zip(
                        tokens[place, :count].tolist(), values[place, :count].tolist(), strict=True
                    )
                    if value > -math.inf  # impossible ones, and what pads the vocabulary
                ],
            )
            for place, (row, count) in enumerate(self.wanted.items())
        }


def observe(
    logits: mx.array, tokens: mx.array, rows: Sequence[RowSampler | None]
) -> Observed | None:
    """Enqueue what the rows that asked want to know; None where no row did.

    Args:
        logits: [rows, vocabulary], processed.
        tokens: uint32 [rows], as drawn.
    """
    asked = {
        row: min(sampler.settings.logprobs, logits.shape[1])
        for row, sampler in enumerate(rows)
        if sampler is not None and sampler.settings.logprobs is not None
    }
    if not asked:
        return None
    # A few row counts only, so that a few shapes are compiled.
    padded = min(1 << (len(asked) - 1).bit_length(), logits.shape[0])
    index = mx.array([*asked, *[max(asked)] * (padded - len(asked))])
    logits = numeric.padded(logits[index])
    highest = numeric.best(logits)
    total = highest + mx.log(numeric.total(numeric.exp(logits - highest)))
    chosen = mx.take_along_axis(logits, tokens[index][:, None], axis=-1)
    values, candidates = top(logits, NARROW_LIMITS[0])
    return Observed(asked, _finite(chosen) - total, _finite(values) - total, candidates)


def _finite(logits: mx.array) -> mx.array:
    """Impossible tokens again as minus infinity."""
    return mx.where(logits <= numeric.LOWEST, -mx.inf, logits)
