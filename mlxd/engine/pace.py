"""How much prefill an iteration may do while rows decode, by costs that were measured at load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlxd.engine.port import Chunk
from mlxd.engine.rows import Row
from mlxd.wire import BatchTuning, Pacing

#: A prompt always advances by this much, however slow the machine or long its context.
SMALLEST = 16

#: While rows decode, an iteration's prefill may take this many times as long as its step. With
#: the step itself, the gap between two tokens is one step more. `balanced` keeps that below
#: 4 quiet gaps, with something left for what joining costs, and leaves prefill most of the
#: time; `throughput` is bound by the budget of tokens alone.
PREFILL_PER_STEP: Mapping[Pacing, float] = {
    Pacing.LATENCY: 1.0,
    Pacing.BALANCED: 2.0,
    Pacing.THROUGHPUT: math.inf,
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a decode step costs."""

    rows: int  # of a pool of this width
    base: float  # seconds, with nothing to read
    column: float  # seconds more for each token of the longest row

    def of(self, longest: int) -> float:
        """Seconds with rows of this many tokens at most."""
        return self.base + self.column * longest


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps and prompt tokens cost. Constants, so that decisions made with them depend on
    no clock."""

    steps: Sequence[StepCost]  # the narrowest first; none = nothing was measured
    call: float  # seconds that a piece of a prompt costs, however short
    token: float  # seconds more for each token
    pair: float  # seconds more for each token that stands before it: attention

    def step(self, rows: int, longest: int) -> float:
        """Seconds of a step of so many rows, the longest of which has so many tokens."""
        if not self.steps:
            return math.inf
        return next((s for s in self.steps if s.rows >= rows), self.steps[-1]).of(longest)

    def cost(self, start: int, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens from position `start` on."""
        return self.call + tokens * (self.token + self.pair * (start + tokens / 2))

    def fitting(self, start: int, seconds: float, most: int) -> int:
        """Tokens from position `start` on that take at most these seconds; at most `most`.

        The mean cost of `most` tokens stands for each of them, so that fewer take
        a little less than these seconds, never more.
        """
        whole = self.cost(start, most)
        if not most or whole <= seconds:
            return most
        return max(0, int((seconds - self.call) * most / (whole - self.call)))


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
