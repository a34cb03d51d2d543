"""When an engine that died is followed by another, and when not any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off between engines of one model. Times are seconds."""

    first: float = 0.5  # before the first restart; doubled for each further death in a row
    longest: float = 60.0
    limit: int = 5  # restarts in a row that are tried
    steady: float = 300.0  # an engine that served for so long ends the row


class Restarts:
    """Counts deaths in a row.

    An engine that has finished a request, or has served for a while, ends the row: a request
    that kills engines must not take the model from everybody else for good.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._in_a_row = 0

    def died(self, *, served: float, worked: bool) -> float | None:
        """Seconds to wait before the next engine; None when there should be none.

        Args:
            served: seconds from the engine's readiness to its end, 0 where it never was ready.
            worked: whether it finished a request.
        """
        if worked or served >= self._policy.steady:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row > self._policy.limit:
            return None
        return min(self._policy.first * 2.0 ** (self._in_a_row - 1), self._policy.longest)
