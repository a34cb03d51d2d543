"""Where a decoding row sits, and what a step will give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxd.engine.constraint import Constraint, constrain
from mlxd.engine.pool import Pool
from mlxd.engine.port import Drawn
from mlxd.engine.sampling import Observed, RowSampler


@dataclass(slots=True)
class Seat:
    """Where a decoding row sits. Owned by the runner."""

    pool: Pool
    slot: int
    position: int  # column that the row's next step writes
    sampler: RowSampler
    window: int  # its last tokens that penalties look at
    constraint: Constraint | None  # the grammar that it must follow
    prompt: int  # tokens that it was prefilled with, and that its constraint has taken


@dataclass(frozen=True, slots=True)
class Part:
    """One pool's share of a step on its way."""

    slots: dict[int, int]  # row -> its slot
    tokens: mx.array  # [rung]
    observed: Observed | None
    errors: dict[int, str]  # row -> why it cannot go on

    @property
    def arrays(self) -> list[mx.array]:
        """What the step is to compute."""
        return [self.tokens, *(self.observed.arrays if self.observed is not None else [])]

    def read(self) -> list[Drawn]:
        """Wait for it."""
        tokens = np.array(self.tokens)
        logprobs = {} if self.observed is None else self.observed.read()
        return [
            Drawn(row, int(tokens[slot]), logprobs.get(slot), self.errors.get(row))
            for row, slot in self.slots.items()
        ]


def constrained(
    logits: mx.array, fed: mx.array, seats: Mapping[int, Seat]
) -> tuple[mx.array, dict[int, str]]:
    """Make the rows of a pool follow their grammars.

    Args:
        logits: [slots, vocabulary], of a step whose rows are at their new positions.
        fed: uint32 [slots], the tokens that the step was fed.
        seats: the rows in the step.

    Returns:
        The logits, and why some rows cannot go on.
    """
    found = {
        row: (seat, seat.constraint) for row, seat in seats.items() if seat.constraint is not None
    }
    if not found:
        return logits, {}
    # The forward pass runs while the host waits for the tokens that it was fed, and
    # finds what may follow them.
    mx.async_eval(logits)
    tokens = np.array(fed)
    for seat, constraint in found.values():
        if seat.position > seat.prompt:  # else it was fed its prompt's last token
            constraint.advance(int(tokens[seat.slot]))
    logits = constrain(logits, {seat.slot: constraint for seat, constraint in found.values()})
    errors = {row: constraint.error for row, (_seat, constraint) in found.items()}
    return logits, {row: error for row, error in errors.items() if error is not None}
