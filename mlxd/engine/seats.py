"""Where a decoding row sits, and what a step will give it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

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


@dataclass(frozen=True, slots=True)
class Part:
    """One pool's share of a step on its way."""

    slots: dict[int, int]  # row -> its slot
    tokens: mx.array  # [rung]
    observed: Observed | None

    @property
    def arrays(self) -> list[mx.array]:
        """What the step is to compute."""
        return [self.tokens, *(self.observed.arrays if self.observed is not None else [])]

    def read(self) -> list[Drawn]:
        """Wait for it."""
        tokens = np.array(self.tokens)
        logprobs = {} if self.observed is None else self.observed.read()
        return [
            Drawn(row, int(tokens[slot]), logprobs.get(slot)) for row, slot in self.slots.items()
        ]
