"""How much prefill an iteration may do while rows decode, by costs that were measured at load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxd.engine.port import Chunk
from mlxd.engine.rows import Row
from mlxd.wire import BatchTuning

#: A prompt always advances by this much, however slow the machine or long its context.
SMALLEST = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """A limit on the seconds of prefill in one iteration, and what prompt tokens cost.

    Constants, so that decisions made with them depend on no clock.
    """

    limit: float  # seconds of prefill per iteration
    token: float  # seconds that a token costs by itself
    pair: float  # seconds more for each token that stands before it: attention

    def cost(self, start: int, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens from position `start` on."""
        return tokens * (self.token + self.pair * (start + tokens / 2))

    def fitting(self, start: int, seconds: float, most: int) -> int:
        """Tokens from position `start` on that take at most these seconds; at most `most`.

        The mean cost of `most` tokens stands for each of them, so that fewer take
        a little less than these seconds, never more.
        """
        each = self.cost(start, most) / most if most else 0.0
        return most if each * most <= seconds else max(0, int(seconds / each))


def plan(
    rows: Iterable[Row], tuning: BatchTuning, pace: Pace, seconds: float
) -> list[tuple[Row, Chunk]]:
    """What one iteration prefills: at most one chunk per row, in order.

    A prompt that fits in one chunk is not cut to use up what is left of the
    limits: whole ones can be computed together.

    Args:
        rows: those that have tokens to prefill, first come first.
        seconds: what the iteration may take, by the pace; the budget of tokens
            counts besides.
    """
    budget = tuning.prefill_budget
    planned: list[tuple[Row, Chunk]] = []
    for row in rows:
        start = row.prefilled
        size = min(row.to_prefill, tuning.prefill_chunk)
        if size == 0:
            continue
        fitting = pace.fitting(start, seconds, min(size, max(budget, 0)))
        if planned and fitting < size:
            break
        size = min(size, max(fitting, SMALLEST))
        tokens = row.context[start : start + size]
        planned.append((row, Chunk(row.id, tokens, start, last=size == row.to_prefill)))
        budget -= size
        seconds -= pace.cost(start, size)
    return planned
