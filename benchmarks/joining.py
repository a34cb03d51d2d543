"""What rows that come, go and grow cost the others: mlxd's slots, and mlx-lm's batch cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from benchmarks.shapes import Built
from mlxd.engine import attention
from mlxd.engine.memory import HEADROOM
from mlxd.engine.pool import capacity_classes, rung_for
from mlxd.engine.port import Chunk
from mlxd.engine.runner import Runner
from mlxd.engine.slots.full import FullSpec
from mlxd.wire import BatchTuning, Lane, Sampling, Submit

#: Steps and joins of which the median counts.
PASSES = 7
_GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of event.

    Attributes:
        seconds: how much longer the step takes that the event comes before.
        peak_growth: bytes by which the event's peak memory is above a quiet step's.
    """

    who: str
    name: str
    seconds: float
    peak_growth: int


def measure(built: Built, rows: int, context: int) -> Iterator[Event]:
    """Every event at this many rows of this many tokens, mlxd's and then mlx-lm's."""
    with attention.seam(built.loaded.model, "auto"):
        yield from _Slots(built, rows, context).events()
    mx.clear_cache()
    yield from _batch_cache(built, rows, context)


class _Slots:
    """A runner with blank rows: zeros in their columns, which cost what others do."""

    def __init__(self, built: Built, rows: int, context: int) -> None:
        self._runner = Runner(built.loaded, BatchTuning(rows, context, context))
        self._rows, self._context = rows, context
        self._seated: list[int] = []
        self._next = 0
        self._limit = built.loaded.context

    def events(self) -> Iterator[Event]:
        """Join, leave, a wider rung, a larger class."""
        joins, leaves = [], []
        self._seat(self._rows - 1)
        for _ in range(PASSES):
            self._prefill(self._context)
            joins.append(self._extra(lambda: self._join(self._context)))
            leaves.append(self._extra(self._leave))
        yield _median("mlxd", "join within a rung", joins)
        yield _median("mlxd", "leave", leaves)
        while len(self._seated) > self._rows // 2:
            self._leave()
        self._settle()
        self._prefill(self._context)
        wider = self._extra(lambda: self._join(self._context))
        rung = rung_for(self._rows // 2, self._rows)
        yield _median("mlxd", f"join, rung {rung} to {rung_for(rung + 1, self._rows)}", [wider])
        while self._seated:
            self._leave()
        self._settle()
        yield self._growing("first time")
        yield self._growing("again")

    def _growing(self, when: str) -> Event:
        """A row that fills its class moves to the next one, beside one that stays."""
        smaller, larger = capacity_classes(self._limit)[:2]
        for length in (smaller - HEADROOM, smaller // 2):
            self._prefill(length)
            self._join(length)
        for _ in range(HEADROOM + 1):
            self._step()
        moved = self._extra(lambda: None)
        while self._seated:
            self._leave()
        self._settle()
        name = f"move of one row, class {smaller} to {larger}, {when}"
        return _median("mlxd", name, [moved])

    def _settle(self) -> None:
        """Step until the pool has the width that its rows need."""
        for _ in range(40):
            if self._seated:
                self._step()
        self._runner.rest()

    def _seat(self, count: int) -> None:
        """Blank rows."""
        for _ in range(count):
            self._join(self._context)

    def _prefill(self, length: int) -> None:
        """The next row's state, ready to be joined."""
        tokens = [1 + n % 100 for n in range(length - 1)]
        self._runner.prefill([Chunk(self._next, tokens, 0, last=True)])
        mx.synchronize()

    def _join(self, length: int) -> None:
        request = Submit(self._next, Lane.BATCH, [1] * length, HEADROOM, [], _GREEDY)
        self._runner.seat(self._next, request)
        self._seated.append(self._next)
        self._next += 1

    def _leave(self) -> None:
        self._runner.release(self._seated.pop())

    def _step(self) -> float:
        """Seconds of one step, from enqueuing it to its tokens."""
        began = time.perf_counter()
        if self._seated:
            self._runner.decode(self._seated)
            self._runner.collect()
        return time.perf_counter() - began

    def _extra(self, event: Callable[[], None]) -> tuple[float, int]:
        """Seconds and peak bytes that the event adds to a step; the second step after it
        is a quiet one again."""
        mx.synchronize()
        with _peak() as loud_peak:
            began = time.perf_counter()
            event()
            self._step()
            loud = time.perf_counter() - began
        self._step()
        with _peak() as quiet_peak:
            quiet = statistics.median(self._step() for _ in range(3))
        return loud - quiet, loud_peak[0] - quiet_peak[0]


def _batch_cache(built: Built, rows: int, context: int) -> Iterator[Event]:
    """mlx-lm's batch cache, by its public methods; what its generator calls between steps."""
    layout = [spec for spec in built.loaded.layout or [] if isinstance(spec, FullSpec)]
    caches = [BatchKVCache([0] * (rows - 1)) for _ in layout]
    singles = [KVCache() for _ in layout]
    for spec, cache, single in zip(layout, caches, singles, strict=True):
        keys = mx.random.normal((rows, spec.heads, context, spec.key_dim), spec.dtype)
        values = mx.random.normal((rows, spec.heads, context, spec.value_dim), spec.dtype)
        mx.eval(cache.update_and_fetch(keys[1:], values[1:]))
        mx.eval(single.update_and_fetch(keys[:1], values[:1]))
    joins, leaves = [], []
    for _ in range(3):
        joins.append(_timed(lambda: _extend(caches, singles)))
        leaves.append(_timed(lambda: _filter(caches, rows - 1)))
    yield _median("mlx-lm", "join", joins)
    yield _median("mlx-lm", "leave", leaves)


def _extend(caches: Sequence[BatchKVCache], singles: Sequence[KVCache]) -> None:
    for cache, single in zip(caches, singles, strict=True):
        cache.extend(BatchKVCache.merge([single]))
    mx.eval([cache.state for cache in caches])


def _filter(caches: Sequence[BatchKVCache], rows: int) -> None:
    for cache in caches:
        cache.filter(list(range(rows)))
    mx.eval([cache.state for cache in caches])


def _timed(event: Callable[[], None]) -> tuple[float, int]:
    mx.synchronize()
    before = mx.get_active_memory()
    with _peak() as peak:
        began = time.perf_counter()
        event()
        mx.synchronize()
        seconds = time.perf_counter() - began
    return seconds, peak[0] - before


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The peak memory of the block, in a list that has it when the block is left."""
    mx.reset_peak_memory()
    result: list[int] = []
    yield result
    result.append(mx.get_peak_memory())


def _median(who: str, name: str, measured: Sequence[tuple[float, int]]) -> Event:
    seconds, growth = zip(*measured, strict=True)
    return Event(who, name, statistics.median(seconds), max(growth))
