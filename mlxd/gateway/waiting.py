"""The waiting order of one model: one line for both lanes, fair between callers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from mlxd.wire import Lane

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides about a place, beside its arrival."""

    caller: str | None = None
    weight: float = 1.0  # turns that the caller gets, beside other callers
    priority: int = 0  # higher first, whoever asks


ORDINARY = Standing()


class WaitingLine(Generic[T]):
    """Who is next: the highest priority, then the caller that has had least for its weight.

    Every caller has a virtual time, which each of its turns moves on by
    1 / weight; the earliest goes first, and of equal ones who came first. A
    caller that comes anew starts at the time of the last turn, so that nobody
    saves turns up by not asking. With one caller this is the order of arrival.
    """

    def __init__(self) -> None:
        self._returned: dict[T, None] = {}
        self._items: dict[T, Standing] = {}  # keeps the order of arrival, removes in O(1)
        self._waiting: dict[str | None, int] = {}  # items of each caller that has any
        self._times: dict[str | None, float] = {}
        self._now = 0.0

    def push(self, item: T, standing: Standing = ORDINARY) -> None:
        """Take a place."""
        caller = standing.caller
        if caller not in self._waiting:
            self._times[caller] = max(self._times.get(caller, 0.0), self._now)
        self._waiting[caller] = self._waiting.get(caller, 0) + 1
        self._items[item] = standing

    def put_back(self, items: Iterable[T]) -> None:
        """Take the first places, in this order, before everybody: they had their turn before."""
        self._returned = dict.fromkeys(items) | self._returned

    def pop(self) -> T:
        """Take out whoever is next. Raises StopIteration when nobody waits."""
        item = next(iter(self))
        if item in self._returned:
            del self._returned[item]
            return item
        standing = self._items[item]
        self.remove(item)
        self._now = self._times[standing.caller]
        self._times[standing.caller] += 1 / standing.weight
        return item

    def remove(self, item: T) -> None:
        """Leave the line. Raises KeyError when it does not stand in it."""
        if item in self._returned:
            del self._returned[item]
            return
        caller = self._items.pop(item).caller
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    def __iter__(self) -> Iterator[T]:
        """Those who wait, next first."""
        return chain(tuple(self._returned), self._in_turn())

    def __len__(self) -> int:
        return len(self._returned) + len(self._items)

    def _in_turn(self) -> list[T]:
        if len(self._waiting) < 2:  # sorting is stable: one caller's items are in order already
            return sorted(self._items, key=lambda item: -self._items[item].priority)
        turns = {item: turn for turn, item in self._turns()}
        return sorted(turns, key=turns.__getitem__)

    def _turns(self) -> Iterator[tuple[tuple[int, float, int], T]]:
        """Each item with its place in the order: priority, virtual time, arrival."""
        times = dict(self._times)
        in_order = enumerate(sorted(self._items.items(), key=lambda entry: -entry[1].priority))
        for arrival, (item, standing) in in_order:
            yield (-standing.priority, times[standing.caller], arrival), item
            times[standing.caller] += 1 / standing.weight


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
