"""What a unit of work may take before the daemon's watchdog takes it for a hang."""

from __future__ import annotations

from collections.abc import Iterable

from mlxd.engine.pace import Pace

#: Loading reads files at this rate or better.
LOAD_FLOOR = 60.0
LOAD_BYTES_PER_SECOND = 50e6
WARMUP = 900.0
#: Any unit of work may meet a shape that was not compiled yet: on CUDA that takes up to a minute.
WORK_FLOOR = 120.0
#: Other processes, and other rows in the same call, can slow work down by this factor.
SLACK = 10.0
#: Seconds for a prompt token where nothing was measured: a large model on a slow BLAS.
UNMEASURED_TOKEN = 1.0


def load(weight_bytes: int) -> float:
    """Seconds to read weight files of this size."""
    return LOAD_FLOOR + weight_bytes / LOAD_BYTES_PER_SECOND


def work(pace: Pace, prompts: Iterable[tuple[int, int]], rows: int = 1, longest: int = 1) -> float:
    """Seconds for one iteration: prefill and a step.

    Args:
        prompts: parts of prompts, as (position, tokens).
        rows: that the step has.
        longest: tokens of the longest of them.
    """
    if not pace.steps:
        return WORK_FLOOR + UNMEASURED_TOKEN * sum(tokens for _start, tokens in prompts)
    prefill = sum(pace.cost(start, tokens) for start, tokens in prompts)
    return WORK_FLOOR + SLACK * (prefill + pace.step(rows, longest))
