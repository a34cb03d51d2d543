"""Lines that repeat are thinned out, and say how many were left out before them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

#: The canonical line of each request: one for each, however many.
CANONICAL = "mlxd.request"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much of one line may be written: so many at once, then so many a second."""

    burst: float
    per_second: float


#: Of warnings and worse: what goes wrong again and again is known after a few lines.
TROUBLE = Allowance(burst=20, per_second=0.1)
#: Of the others; a traceback that an engine prints fits in.
TALK = Allowance(burst=200, per_second=10)


@dataclass(slots=True)
class _Bucket:
    """What is left of one line's allowance."""

    left: float
    filled: float  # moment of the last refill
    suppressed: int = 0


class Repetition(logging.Filter):
    """A token bucket for each line that the code can write.

    What makes two lines the same is where they come from and their model, never
    what a client sent, so that there are few buckets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._buckets: dict[Hashable, _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; one that follows others left out says how many."""
        if record.name == CANONICAL and record.levelno < logging.WARNING:
            return True
        allowance = TROUBLE if record.levelno >= logging.WARNING else TALK
        now = self._clock()
        bucket = self._buckets.setdefault(_source(record), _Bucket(allowance.burst, now))
        refill = (now - bucket.filled) * allowance.per_second
        bucket.left, bucket.filled = min(allowance.burst, bucket.left + refill), now
        if bucket.left < 1:
            bucket.suppressed += 1
            return False
        bucket.left -= 1
        if bucket.suppressed:
            _tell(record, bucket.suppressed)
            bucket.suppressed = 0
        return True


def _source(record: logging.LogRecord) -> Hashable:
    if isinstance(record.msg, dict):  # structlog's
        event = record.msg
        return record.name, record.levelno, event.get("event"), event.get("model")
    return record.name, record.levelno, record.pathname, record.lineno


def _tell(record: logging.LogRecord, suppressed: int) -> None:
    if isinstance(record.msg, dict):
        record.msg = {**record.msg, "suppressed": suppressed}
    else:
        record.msg = f"{record.getMessage()} (and {suppressed} more like it before)"
        record.args = None
