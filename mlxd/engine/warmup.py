"""Warm-up: compile what serving will need before the model counts as ready.

It also finds out whether the batch lane can run this model at all, since some
models keep state of their own or look into their caches, which only shows when
a step is traced; and how long steps and prefill take on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.engine import prefill, trial
from mlxd.engine.loading import BATCHABLE, LoadedModel
from mlxd.engine.pace import Pace, StepCost
from mlxd.engine.pool import SMALLEST_COLUMNS, rungs
from mlxd.engine.port import Chunk
from mlxd.engine.runner import Runner
from mlxd.engine.sampling import Draw, RowSampler, sample
from mlxd.engine.slots import ColumnSpec
from mlxd.wire import BatchTuning, Capabilities, Lane, Sampling, Submit

REASON_CACHE = "cache"

#: Pieces of so many tokens are prefilled at the start of a context, to find out what a call
#: costs and what a token adds, and one behind so many others, for what these add. The best of a
#: few passes counts, of steps too: what else the machine does can only slow them.
PACE_PIECES, PACE_DEPTH, PACE_PASSES = (32, 128), 1024, 2
#: Context lengths, as counts of the smallest columns, that most requests live in.
WARM_COLUMNS = range(1, 5)

_GREEDY = Sampling(seed=0, temperature=0.0)
#: Settings that together need every kernel that sampling compiles.
_PROGRAMS = (
    Sampling(seed=0, top_k=40),
    Sampling(seed=0, top_k=40, top_p=0.9),
    Sampling(seed=0, top_k=100),
    Sampling(seed=0, top_k=100, top_p=0.9),
    Sampling(seed=0),
    Sampling(seed=0, top_p=0.9),
    Sampling(seed=0, top_k=2000),
    Sampling(seed=0, top_k=2000, top_p=0.9),
    Sampling(seed=0, xtc_probability=1.0),
)


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """What warm-up found, and how long it took."""

    capabilities: Capabilities
    pace: Pace
    working_bytes: int  # beside weights and KV, at the peak of a full-sized step or prefill
    seconds: float


def run(runner: Runner, loaded: LoadedModel, tuning: BatchTuning) -> WarmedUp:
    """Step every width at the most common lengths, and sample with every program.

    Raises:
        RuntimeError: MLX cannot compile here; its temporary folder may not be writable.
    """
    began = time.perf_counter()
    mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.ones(4)))
    serial_only = None if _can_step(runner, loaded) else REASON_CACHE
    pace = Pace(steps=(), call=0.0, token=0.0, pair=0.0)
    sampling = stepping = prefilling = 0
    if serial_only is None:
        # A row beyond the context would write outside its slot.
        lengths = [min(SMALLEST_COLUMNS * n - 1, loaded.context) for n in WARM_COLUMNS]
        for width in rungs(tuning.width):
            for length in lengths:
                _step(runner, width, length)
        steps = [_step_cost(runner, width, lengths) for width in rungs(tuning.width)]
        stepping = _step_bytes(runner, tuning.width, lengths[0], lengths[-1], loaded.context)
        pace, prefilling = _costs(loaded, steps, tuning)
    for width in rungs(tuning.width):
        sampling = _sample(loaded, width)
    capabilities = Capabilities(
        vocab_size=loaded.vocab_size,
        context=loaded.context,
        cache_classes=loaded.cache_classes,
        serial_only=serial_only,
        batchable=list(BATCHABLE),
        structured=loaded.constraints is not None,
        row_bytes=runner.row_bytes,
        kv_bits=loaded.kv_bits,
    )
    working = max(sampling + stepping, prefilling)
    mx.reset_peak_memory()  # of serving, from here on
    return WarmedUp(capabilities, pace, working, time.perf_counter() - began)


def _can_step(runner: Runner, loaded: LoadedModel) -> bool:
    """Whether the model runs on slots; the runner is told how."""
    stepping = trial.stepping(loaded)
    runner.compiles = stepping == "compiled"
    return stepping is not None


def _step(runner: Runner, width: int, length: int) -> float:
    """Seat `width` rows, decode one step, leave; seconds of the step.

    Rows that were not prefilled have blank state, which compiles and costs the same.
    """
    for row in range(width):
        runner.seat(row, Submit(row, Lane.BATCH, [0] * length, 1, [], _GREEDY))
    began = time.perf_counter()
    runner.decode(range(width))
    runner.collect()
    seconds = time.perf_counter() - began
    for row in range(width):
        runner.release(row)
    runner.rest()
    return seconds


def _step_cost(runner: Runner, width: int, lengths: Sequence[int]) -> StepCost:
    """What a step of this width costs, by its seconds at the first and the last length."""
    near, far = (
        min(_step(runner, width, length) for _ in range(PACE_PASSES))
        for length in (lengths[0], lengths[-1])
    )
    column = max(0.0, far - near) / max(1, lengths[-1] - lengths[0])
    return StepCost(width, max(1e-9, near - column * lengths[0]), column)


def _step_bytes(runner: Runner, width: int, short: int, long: int, context: int) -> int:
    """Bytes that a step of full width takes at its peak, beside weights and KV, when all its rows
    are at the end of the context; from what it takes at two lengths."""

    def measured(length: int) -> int:
        for row in range(width):
            runner.seat(row, Submit(row, Lane.BATCH, [0] * length, 1, [], _GREEDY))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.decode(range(width))
        runner.collect()
        for row in range(width):
            runner.release(row)
        runner.rest()
        return max(0, mx.get_peak_memory() - before)

    near, far = measured(short), measured(long)
    slope = max(0.0, (far - near) / (long - short)) if long > short else 0.0
    return int(far + slope * (context - long))


def _costs(loaded: LoadedModel, steps: Sequence[StepCost], tuning: BatchTuning) -> tuple[Pace, int]:
    """What prefill costs here, and the bytes that an iteration's worth takes, at the end of the
    context if it comes to that."""
    small, size = (min(piece, loaded.context // 4) for piece in PACE_PIECES)
    depth = min(PACE_DEPTH, loaded.context // 2)
    short = min(_chunk(loaded, small, 0) for _ in range(1 + PACE_PASSES))
    first = min(_chunk(loaded, size, 0) for _ in range(1 + PACE_PASSES))
    later = min(_chunk(loaded, size, depth) for _ in range(PACE_PASSES))
    pair = max(0.0, later.seconds - first.seconds) / (size * depth)
    call = token = 0.0
    if size > small:
        token = max(0.0, first.seconds - short.seconds) / (size - small)
        call = max(0.0, short.seconds - token * small)
    token = max((first.seconds - call) / size - pair * size / 2, 1e-9)
    pair_bytes = max(0, later.working - first.working) / (size * depth)
    token_bytes = first.working / size
    chunk = tuning.prefill_chunk * (token_bytes + pair_bytes * loaded.context)
    together = tuning.prefill_budget * token_bytes
    return Pace(steps, call, token, pair), int(max(chunk, together))


@dataclass(frozen=True, slots=True, order=True)
class Chunked:
    """One measured chunk of prefill."""

    seconds: float
    working: int  # bytes at its peak, beside what was there before and its own new state


def _chunk(loaded: LoadedModel, size: int, depth: int) -> Chunked:
    """Prefill `size` tokens behind a blank context of `depth` tokens.

    Windows are left empty: what they add is bounded, and small beside full attention.
    """
    caches = loaded.make_caches()
    for layer, spec in enumerate(loaded.layout or []):
        if depth and isinstance(spec, ColumnSpec):
            # With room for the chunk: caches grow by many chunks at a time.
            shapes = spec.shapes(depth + size)
            blank = [mx.zeros((1, *shape), dtype) for shape, dtype in shapes]
            caches[layer] = spec.cache(blank, depth)
    mx.eval(prefill.arrays_of(caches))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    prefill.run(loaded.model, [Chunk(0, [0] * size, depth, last=True)], caches)
    mx.eval(prefill.arrays_of(caches))
    seconds = time.perf_counter() - began
    grown = mx.get_active_memory() - before
    return Chunked(seconds, max(0, mx.get_peak_memory() - before - grown))


def _sample(loaded: LoadedModel, width: int) -> int:
    """Run every sampling program over `width` rows; bytes at the peak."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = mx.zeros((width, loaded.vocab_size), loaded.logits_dtype)
    for settings in _PROGRAMS:
        rows = [RowSampler.of(settings, loaded.vocab_size)] * width
        mx.eval(sample(logits, rows, [Draw(0.0, xtc=settings.xtc_probability > 0)] * width))
    return max(0, mx.get_peak_memory() - before)
