"""Warm-up: compile what serving will need before the model counts as ready.

It also finds out whether the batch lane can run this model at all: some models
keep state of their own or look into their caches, which only shows when a step
is traced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from mlxd.engine.loading import BATCHABLE, LoadedModel
from mlxd.engine.pool import rungs
from mlxd.engine.prefill import Chunk
from mlxd.engine.runner import Runner
from mlxd.engine.sampling import RowSampler, sample
from mlxd.wire import BatchTuning, Capabilities, Lane, Sampling, Submit

REASON_CACHE = "cache"

_GREEDY = Sampling(seed=0, temperature=0.0)
#: One set of settings for each compiled sampling program that clients commonly need.
_PROGRAMS = (
    Sampling(seed=0, top_k=40),
    Sampling(seed=0, top_k=40, top_p=0.9),
    Sampling(seed=0),
    Sampling(seed=0, top_p=0.9),
)


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """What warm-up found, and how long it took."""

    capabilities: Capabilities
    seconds: float


def run(runner: Runner, loaded: LoadedModel, tuning: BatchTuning) -> WarmedUp:
    """Step every width of the smallest class once, and sample with every program."""
    began = time.perf_counter()
    serial_only = None if loaded.layout is not None else REASON_CACHE
    widths = rungs(tuning.width)
    if serial_only is None and tuning.width > 1:
        try:
            for width in widths:
                _step_together(runner, width)
        # Models fail in their own ways on a cache they do not expect.
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
            serial_only = REASON_CACHE
        runner.reset()
    for width in widths if serial_only is None else [1]:
        _sample_together(loaded.vocab_size, width)
    capabilities = Capabilities(
        vocab_size=loaded.vocab_size,
        context=loaded.context,
        cache_classes=loaded.cache_classes,
        serial_only=serial_only,
        batchable=list(BATCHABLE),
    )
    return WarmedUp(capabilities, time.perf_counter() - began)


def _step_together(runner: Runner, width: int) -> None:
    """Prefill a row, seat `width` of them, decode one step and leave."""
    for row in range(width):
        runner.prefill([Chunk(row, [0, 0], 0, last=True)])
        runner.seat(row, Submit(row, Lane.BATCH, [0, 0, 0], 2, [], _GREEDY))
    runner.decode(range(width))
    runner.collect()
    for row in range(width):
        runner.release(row)


def _sample_together(vocab_size: int, width: int) -> None:
    """Run every sampling program over `width` rows."""
    logits = mx.zeros((width, vocab_size))
    for settings in _PROGRAMS:
        rows = [RowSampler.of(settings, vocab_size)] * width
        mx.eval(sample(logits, rows, [0.0] * width))
