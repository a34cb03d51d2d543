"""What the state of rows takes, and how much there is of what it takes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlxd.engine.pool import Pool, class_for, rung_for
from mlxd.engine.slots import LayerSpec

#: Share of a machine's memory that models may take on a CPU where nobody says.
SHARE_OF_RAM = 0.7
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

#: A joining row gets a class that holds this many more tokens, or its limit.
HEADROOM = 64
#: mlx-lm's caches grow by so many tokens at a time.
GRAIN = 256


@dataclass(frozen=True, slots=True)
class Promise:
    """What a row will take that was admitted and has no slot yet."""

    capacity: int  # class of its slot
    state: int  # bytes of its prefill's state, which exists until it is in the slot


class Memory:
    """The account of one engine's rows. Written by the runner; decides nothing.

    All figures are bytes. The limit holds for the pools, free slots included, for
    prefills that have no slot yet, and for the prefix cache, which takes what
    the rows leave.
    """

    def __init__(self, layout: Sequence[LayerSpec], classes: Sequence[int]) -> None:
        self._layout = layout
        self._classes = classes
        self._promises: dict[int, Promise] = {}
        self.limit = math.inf

    def promise(self, row: int, tokens: int, remaining: int) -> None:
        """Count a row in that was admitted."""
        self._promises[row] = self.promised(tokens, remaining)

    def settle(self, row: int) -> None:
        """The row has its slot, or is gone."""
        self._promises.pop(row, None)

    def clear(self) -> None:
        """No row is on its way any more."""
        self._promises.clear()

    def promised(self, tokens: int, remaining: int) -> Promise:
        """What a row takes that is prefilled with these tokens and may be given some more."""
        capacity = class_for(self._classes, tokens + min(remaining, HEADROOM))
        rounded = -(-tokens // GRAIN) * GRAIN
        return Promise(capacity, sum(spec.row_bytes(rounded) for spec in self._layout))

    def projected(
        self,
        pools: Mapping[int, Pool],
        width: int,
        joining: Promise | None = None,
        crossing: Sequence[int] = (),
    ) -> int:
        """Bytes once every promise is kept.

        Args:
            pools: by capacity.
            joining: one more row.
            crossing: classes into which rows move that keep their old slot until then.
        """
        promises = [*self._promises.values(), *([joining] if joining else [])]
        rows = Counter({capacity: pool.live for capacity, pool in pools.items()})
        rows.update(promise.capacity for promise in promises)
        rows.update(crossing)
        total = sum(promise.state for promise in promises)
        widening = 0
        for capacity, count in rows.items():
            now = pools[capacity].rung if capacity in pools else 0
            rung = max(now, rung_for(count, width))
            total += rung * self._row_bytes(capacity)
            if now < rung:  # one layer at a time exists in both widths
                widening = max(widening, now * self._largest_layer(capacity))
        return total + widening

    def classes(self) -> list[tuple[int, int]]:
        """Every class with the bytes of its slot."""
        return [(capacity, self._row_bytes(capacity)) for capacity in self._classes]

    def _row_bytes(self, capacity: int) -> int:
        return sum(spec.row_bytes(capacity) for spec in self._layout)

    def _largest_layer(self, capacity: int) -> int:
        return max((spec.row_bytes(capacity) for spec in self._layout), default=0)


def of_device(cgroup_limits: Sequence[Path] = _CGROUP_LIMITS) -> int:
    """Bytes that models may take of this engine's device where the configuration does not say.

    Metal: the recommended working set. CUDA: the device's memory, less a tenth.
    CPU: 70% of the RAM, or of the control group's limit where that is smaller.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        info = mx.device_info()
        recommended = info.get("max_recommended_working_set_size")
        return int(recommended or int(info["memory_size"]) * 9 // 10)
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in cgroup_limits if path.is_file()]
    return int(SHARE_OF_RAM * min([ram, *(int(text) for text in limits if text.isdigit())]))
