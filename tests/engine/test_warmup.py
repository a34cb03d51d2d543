"""Warm-up finds out what the engine can do with a model, and how fast."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

from mlxd.engine import warmup
from mlxd.engine.loading import LoadedModel
from mlxd.engine.runner import Runner
from mlxd.wire import BatchTuning, Lane
from tests.engine.architectures import build
from tests.engine.tiny import VOCAB, Engine, full, loaded, prompt, solo

TUNING = BatchTuning(2, 32, 64)


class Curious(nn.Module):
    """A model that reads its cache's offset as a number, which slots have none of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = full()
        self.layers = self.inner.layers

    def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        """Look, then compute."""
        if int(cache[0].offset) > 10_000:
            raise ValueError("too long")
        logits: mx.array = self.inner(inputs, cache=cache)
        return logits


def warmed(model: LoadedModel, tuning: BatchTuning = TUNING) -> warmup.WarmedUp:
    """Run warm-up on a runner of its own."""
    return warmup.run(Runner(model, tuning), model, tuning)


def test_a_model_of_full_attention_runs_in_the_batch_lane() -> None:
    """Nothing forces it into the serial one."""
    found = warmed(loaded(full()))
    assert found.capabilities.serial_only is None
    assert found.capabilities.vocab_size == VOCAB
    pace = found.pace
    assert [cost.rows for cost in pace.steps] == [1, 2]
    assert all(0 < pace.step(rows, 9) <= pace.step(rows, 200) for rows in (1, 2))
    assert pace.token > 0
    assert 0 < pace.cost(0, 32) <= pace.cost(500, 32)


@pytest.mark.parametrize("context", [16, 100])
def test_a_context_below_the_usual_lengths_is_warmed_up_within_it(context: int) -> None:
    """No row is stepped beyond it, and the model serves up to its last token."""
    model = loaded(full(), context)
    assert warmed(model).capabilities.serial_only is None
    engine = Engine(model)
    tokens = prompt(context - 4, 1)
    engine.submit(0, tokens, 4)
    engine.run()
    assert engine.tokens[0] == solo(model.model, tokens, 4)


def test_a_cache_class_without_slots_goes_serial_with_reason_cache_and_is_served_there() -> None:
    """Chunked attention, whose one model computes its mask for one offset."""
    model = loaded(build("llama4"))
    assert model.layout is None
    assert warmed(model).capabilities.serial_only == "cache"
    engine = Engine(model)
    tokens = prompt(30, 1)
    engine.submit(0, tokens, 12, lane=Lane.SERIAL)
    engine.run()
    assert engine.tokens[0] == solo(model.model, tokens, 12)


def test_a_model_that_looks_into_its_cache_goes_serial_also_at_width_one() -> None:
    """It is found out at load, so that a wider batch by reload cannot break it."""
    model = loaded(Curious())
    assert warmed(model).capabilities.serial_only == "cache"
    assert warmed(model, BatchTuning(1, 32, 64)).capabilities.serial_only == "cache"


def test_a_model_that_evaluates_inside_steps_without_being_compiled() -> None:
    """It still runs in the batch lane."""
    model = loaded(build("dbrx"))
    runner = Runner(model, TUNING)
    assert warmup.run(runner, model, TUNING).capabilities.serial_only is None
    assert not runner.compiles


def test_a_model_that_slots_would_change_unnoticed_goes_serial(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It runs there, with other logits; standard error says so."""
    assert warmed(loaded(build("afm7"))).capabilities.serial_only == "cache"
    assert "from their own" in capfd.readouterr().err
