"""One row's settings: which program they need, and what chance decides for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxd.wire import Sampling

#: * greedy: temperature 0; the argmax.
#: * narrow: a top_k up to the last of `NARROW_LIMITS`; exact on the top candidates.
#: * wide: everything else; threshold searches over the vocabulary.
Program = Literal["greedy", "narrow", "wide"]

#: Candidates that the narrow program may look at; each is compiled once.
NARROW_LIMITS = (64, 1024)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014), on 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on its arguments only; 24 bits, exact in float32.

    SplitMix64 as a counter-based generator. Seed and stream are mixed first, so that
    neighbouring ones do not give shifted copies of one sequence.
    """
    origin = _mix(seed & _MASK64)
    if stream:
        origin = _mix(origin ^ stream)
    state = (origin + (position + 1) * _GOLDEN) & _MASK64
    return float((_mix(state) >> 40) * 2.0**-24)


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance decides of one token."""

    number: float  # in [0, 1): where in the distribution the token lies
    inside: float = 0.0  # in [0, 1): where there, as the wide program draws in two stages
    xtc: bool = False  # whether XTC removes the best tokens this time


@dataclass(frozen=True, slots=True)
class RowSampler:
    """One row's settings, with the program that they need."""

    settings: Sampling
    program: Program

    @classmethod
    def of(cls, settings: Sampling, vocab_size: int) -> RowSampler:
        """Choose the program. A `top_k` at or above the vocabulary is off."""
        top_k = settings.top_k if settings.top_k < vocab_size else 0
        xtc = settings.xtc_probability > 0
        program: Program = "wide"
        # As the programs see it: a temperature below float32's smallest is 0.
        if np.float32(settings.temperature) == 0 or (top_k == 1 and not xtc):
            program = "greedy"
        # XTC looks at the mass of all that is left, and removes before top_k counts.
        elif 0 < top_k <= NARROW_LIMITS[-1] < vocab_size and not xtc:
            program = "narrow"
        return cls(settings, program)

    def draw(self, position: int) -> Draw:
        """What decides the token at this position of the row's sequence."""
        if self.program == "greedy":
            return Draw(0.0)
        settings = self.settings
        chance = settings.xtc_probability
        return Draw(
            number=uniform(settings.seed, position),
            inside=uniform(settings.seed, position, stream=1),
            xtc=chance > 0 and uniform(settings.seed, position, stream=2) <= chance,
        )

    @property
    def window(self) -> int:
        """How many of its last tokens its penalties look at; 0 without any."""
        s = self.settings
        return max(
            s.repetition_context_size if s.repetition_penalty != 1 else 0,
            s.presence_context_size if s.presence_penalty != 0 else 0,
            s.frequency_context_size if s.frequency_penalty != 0 else 0,
        )
