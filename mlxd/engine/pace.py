"""How much prefill an iteration may do while rows decode, by costs that were measured at load."""

from __future__ import annotations

from dataclasses import dataclass

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
