"""The waiting order of one model: one line for both lanes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from mlxd.wire import Lane

T = TypeVar("T", bound=Hashable)


class WaitingLine(Generic[T]):
    """Arrival order, with removal from anywhere.

    The one place that knows who is next: an order by key and weight replaces
    this class and nothing else.
    """

    def __init__(self) -> None:
        self._order: dict[T, None] = {}  # a dict keeps arrival order and removes in O(1)

    def push(self, item: T) -> None:
        """Take the last place."""
        self._order[item] = None

    def pop(self) -> T:
        """Take out whoever is next. Raises StopIteration when nobody waits."""
        item = next(iter(self._order))
        del self._order[item]
        return item

    def remove(self, item: T) -> None:
        """Leave the line. Raises KeyError when it does not stand in it."""
        del self._order[item]

    def __iter__(self) -> Iterator[T]:
        """Those who wait, next first."""
        return iter(tuple(self._order))

    def __len__(self) -> int:
        return len(self._order)


def startable(running: Iterable[Lane], line: Iterable[Lane], rows: int) -> int:
    """How many of the line could run now, next to what runs, in this order.

    A serial request runs alone; up to `rows` batch requests run together.

    Args:
        running: lanes of the requests that hold a row.
        line: lanes of those that wait, next first.
    """
    taken = list(running)
    if Lane.SERIAL in taken:
        return 0
    started = 0
    for lane in line:
        if lane is Lane.SERIAL:
            return started + (0 if taken or started else 1)
        if len(taken) + started >= rows:
            break
        started += 1
    return started
