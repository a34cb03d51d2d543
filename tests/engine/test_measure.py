"""The machine's own rates, for the benchmark's ceiling."""

from __future__ import annotations

import itertools

from mlxd.engine.measure import measure
from mlxd.engine.runner import Runner
from mlxd.wire import BatchTuning
from tests.engine.tiny import full, loaded, prompt


def test_rates_are_tokens_of_all_rows_by_the_time_they_took() -> None:
    """With a clock that ticks once a look: prefill and decode of a pass take one second each."""
    prompts = [prompt(length, seed=length) for length in (20, 30, 40, 2)]
    clock = map(float, itertools.count()).__next__
    rates = measure(
        Runner(loaded(full()), BatchTuning(4, 64, 64)), prompts, steps=5, budget=64, clock=clock
    )
    assert rates.prompt_tokens == 92 / 4
    assert rates.prefill_rate == 92
    assert rates.decode_rate == 4 * 5
