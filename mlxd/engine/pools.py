"""The pools of one engine: which there are, how wide each is, and where rows sit in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxd.engine.pool import Pool, class_for, rung_for
from mlxd.engine.seats import Seat
from mlxd.engine.slots import LayerSpec

#: Steps that a pool's width stays above what its rows need before it shrinks.
SHRINK_AFTER = 32


class Pools:
    """One pool for each capacity class in use. Owned by the runner, which steps them.

    A pool begins with one slot. It widens when a row finds it full, narrows when it has
    been too wide for a while, and goes when it has long been empty.
    """

    def __init__(
        self,
        layout: Sequence[LayerSpec],
        classes: Sequence[int],
        width: int,
        seats: Mapping[int, Seat],
    ) -> None:
        """No pools yet.

        Args:
            classes: capacities, ascending.
            width: rows that decode together; more may run on after it was made smaller.
            seats: of the rows that decode, by row; they are told where they are moved.
        """
        self.width = width
        self._layout = layout
        self._classes = classes
        self._seats = seats
        self._pools: dict[int, Pool] = {}
        self._slack: dict[int, int] = {}  # capacity -> steps that its pool was too wide

    @property
    def by_capacity(self) -> Mapping[int, Pool]:
        """The pools there are."""
        return self._pools

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, taken or not."""
        return sum(pool.nbytes for pool in self._pools.values())

    def with_room(self, need: int) -> Pool:
        """The pool of the smallest class that holds `need` tokens, with a free slot."""
        capacity = class_for(self._classes, need)
        pool = self._pools.get(capacity)
        if pool is None:
            pool = self._pools[capacity] = Pool(self._layout, capacity, 1)
        if pool.live == pool.rung:
            pool.resize(rung_for(pool.live + 1, self.width))
        self._slack.setdefault(capacity, 0)
        return pool

    def move_up(self, seat: Seat) -> None:
        """Move a row that filled its class to the next one."""
        pool = self.with_room(seat.position + 1)
        slot = pool.take()
        pool.move(slot, seat.pool, seat.slot)
        seat.pool.free(seat.slot)
        seat.pool, seat.slot = pool, slot

    def shrink(self) -> None:
        """Narrow pools that have been too wide for a while; drop empty ones. Once a step."""
        for capacity, pool in list(self._pools.items()):
            self._slack[capacity] = self._slack[capacity] + 1 if self._too_wide(pool) else 0
            if self._slack[capacity] >= SHRINK_AFTER:
                self._fit(capacity, pool)

    def narrow(self) -> None:
        """Give up now what `shrink` would in a while."""
        for capacity, pool in list(self._pools.items()):
            if self._too_wide(pool):
                self._fit(capacity, pool)

    def drop_empty(self) -> None:
        """Pools without rows go."""
        for capacity, pool in list(self._pools.items()):
            if pool.live == 0:
                self._drop(capacity)

    def clear(self) -> None:
        """All go, whoever sits in them."""
        self._pools.clear()
        self._slack.clear()

    def _too_wide(self, pool: Pool) -> bool:
        return pool.live == 0 or rung_for(pool.live, self.width) < pool.rung

    def _fit(self, capacity: int, pool: Pool) -> None:
        """Make a pool as wide as its rows need."""
        self._slack[capacity] = 0
        if pool.live == 0:
            self._drop(capacity)
        else:
            self._compact(pool, rung_for(pool.live, self.width))
        mx.clear_cache()

    def _drop(self, capacity: int) -> None:
        del self._pools[capacity], self._slack[capacity]

    def _compact(self, pool: Pool, rung: int) -> None:
        """Move the rows that sit beyond `rung` below it, then narrow the pool."""
        for seat in self._seats.values():
            if seat.pool is pool and seat.slot >= rung:
                slot = pool.take()
                pool.move(slot, pool, seat.slot)
                pool.free(seat.slot)
                seat.slot = slot
        pool.resize(rung)
