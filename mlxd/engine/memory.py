"""What the state of rows takes, and how much there is of what it takes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlxd.engine.pool import Pool, class_for, rung_for
from mlxd.engine.slots import LayerSpec

#: Share of a machine's memory that models may take on a CPU where nobody says.
SHARE_OF_RAM = 0.7
#: The same of a GPU that recommends nothing.
SHARE_OF_GPU = 0.9

#: A joining row gets a class that holds this many more tokens, or its limit.
HEADROOM = 64
#: mlx-lm's caches grow by so many tokens at a time.
GRAIN = 256


@dataclass(frozen=True, slots=True)
class Promise:
    """What a row will take that was admitted and has no slot yet."""

    capacity: int | None  # class of its slot; None = it never has one
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
        self._bytes = {c: sum(spec.row_bytes(c) for spec in layout) for c in classes}
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
        return Promise(capacity, self.state(tokens))

    def state(self, tokens: int) -> int:
        """Bytes of mlx-lm's caches with so many tokens, which grow in steps and may have begun
        one at any place."""
        rounded = (-(-tokens // GRAIN) + 1) * GRAIN
        return sum(spec.row_bytes(rounded) for spec in self._layout)

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
        rows.update(each.capacity for each in promises if each.capacity is not None)
        rows.update(crossing)
        total = sum(promise.state for promise in promises)
        widening = 0
        for capacity, count in rows.items():
            now = pools[capacity].rung if capacity in pools else 0
            rung = now if count <= now else rung_for(count, width)
            total += rung * self._bytes[capacity]
            if now < rung:  # one layer at a time exists in both widths
                widening = max(widening, now * self._largest_layer(capacity))
        return total + widening

    def classes(self) -> list[tuple[int, int]]:
        """Every class with the bytes of its slot."""
        return list(self._bytes.items())

    def _largest_layer(self, capacity: int) -> int:
        return max((spec.row_bytes(capacity) for spec in self._layout), default=0)


def of_device() -> int:
    """Bytes that models may take of this engine's device where the configuration does not say."""
    if mx.default_device() != mx.Device(mx.cpu):
        return of_gpu(mx.device_info(), mx.get_active_memory())
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(SHARE_OF_RAM * min([ram, *group_limits()]))


def of_gpu(info: Mapping[str, str | int], held: int) -> int:
    """Metal: the recommended working set. CUDA: nine tenths of what is free, or ours already.

    Args:
        info: what MLX says of the device.
        held: bytes that this process has.
    """
    recommended = info.get("max_recommended_working_set_size")
    if recommended is not None:
        return int(recommended)
    return int(SHARE_OF_GPU * (int(info["free_memory"]) + held))


def group_limits(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Memory limits, in bytes, of the control groups around this process: a container or a unit."""
    if not own.is_file():
        return
    for line in own.read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        top = root / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            if (folder / name).is_file():
                text = (folder / name).read_text().strip()
                if text.isdigit():  # else "max"
                    yield int(text)
