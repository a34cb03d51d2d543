"""The batch lane computes what mlx-lm computes alone."""

from __future__ import annotations

from collections.abc import Callable

import mlx.nn as nn
import pytest

from mlxd.engine.pool import SMALLEST_CLASS
from mlxd.wire import BatchTuning, FinishReason, Lane
from tests.engine.tiny import MODELS, WINDOW, Engine, full, loaded, mixed_gemma3, prompt, solo


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_rows_that_join_and_leave_at_different_steps_equal_solo_generation(
    make: Callable[[], nn.Module],
) -> None:
    """Contexts below, at and beyond the window, more requests than slots, token for token."""
    model = loaded(make())
    engine = Engine(model, width=4)
    lengths = [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 90, 130, 2]
    counts = [40, 7, 25, 30, 3, 21, 12, 33, 50]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    for number in range(3):
        engine.submit(number, prompts[number], counts[number])
    for number in range(3, len(prompts)):  # the others arrive while these run
        for _ in range(4):
            engine.step()
        engine.submit(number, prompts[number], counts[number])
    engine.run()
    for number, (tokens, count) in enumerate(zip(prompts, counts, strict=True)):
        assert engine.tokens[number] == solo(model.model, tokens, count), f"request {number}"
        assert engine.finished[number].reason is FinishReason.LENGTH


@pytest.mark.parametrize("make", [full, mixed_gemma3], ids=lambda make: make.__name__)
def test_a_row_that_outgrows_its_capacity_class_moves_and_goes_on(
    make: Callable[[], nn.Module],
) -> None:
    """Crossing the class boundary in mid-generation changes no token of any row."""
    model = loaded(make())
    engine = Engine(model, width=4)
    long, short = prompt(SMALLEST_CLASS - 70, 1), prompt(20, 2)
    engine.submit(0, long, 90)
    engine.submit(1, short, 90)
    engine.run()
    assert engine.tokens[0] == solo(model.model, long, 90)
    assert engine.tokens[1] == solo(model.model, short, 90)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_serial_lane_equals_solo_generation(make: Callable[[], nn.Module]) -> None:
    """Our own chunked prefill in front of mlx-lm's generator changes nothing."""
    model = loaded(make())
    engine = Engine(model)
    tokens = prompt(150, 5)
    engine.submit(0, tokens, 30, lane=Lane.SERIAL)
    engine.run()
    assert engine.tokens[0] == solo(model.model, tokens, 30)


def test_a_prompt_of_several_chunks_equals_solo_generation() -> None:
    """Chunks that end anywhere relative to the window give the same state."""
    model = loaded(mixed_gemma3())
    engine = Engine(model, chunk=23)
    tokens = prompt(231, 9)  # the last chunk has a single token
    engine.submit(0, tokens, 20)
    engine.submit(1, tokens[:70], 20)
    engine.run()
    assert engine.tokens[0] == solo(model.model, tokens, 20)
    assert engine.tokens[1] == solo(model.model, tokens[:70], 20)


def test_a_pool_that_narrows_keeps_its_rows() -> None:
    """Rows beyond the smaller rung move below it and go on with the same tokens."""
    model = loaded(full())
    engine = Engine(model, width=8)
    prompts = [prompt(10 + number, number) for number in range(8)]
    for number, tokens in enumerate(prompts):
        engine.submit(number, tokens, 120 if number == 7 else 5)
    widest = engine.runner.kv_bytes
    while not engine.scheduler.idle:
        widest = max(widest, engine.runner.kv_bytes)
        engine.step()
    assert engine.runner.kv_bytes == widest / 8
    assert engine.tokens[7] == solo(model.model, prompts[7], 120)


def test_prompts_that_begin_alike_share_state_and_still_equal_solo() -> None:
    """From the prefix cache, alone or together with others, with the same tokens as without it."""
    model = loaded(full())
    engine = Engine(model, prefix_cache=2**20)
    common = prompt(70, 1)
    prompts = [common + prompt(10 + number, 2 + number) for number in range(4)]
    engine.submit(0, prompts[0], 10)
    engine.run()
    for number in range(1, 4):  # these three join together
        engine.submit(number, prompts[number], 10)
    engine.run()
    engine.submit(4, prompts[0], 10)  # an exact repetition
    engine.run()
    assert engine.finished[0].cached_tokens == 0
    assert [engine.finished[number].cached_tokens for number in range(1, 4)] == [64, 64, 64]
    assert engine.finished[4].cached_tokens == 72
    for number, tokens in enumerate([*prompts, prompts[0]]):
        assert engine.tokens[number] == solo(model.model, tokens, 10)


def test_a_narrower_width_while_rows_run_changes_no_token() -> None:
    """Rows above the new width finish; their pool narrows along the ladder."""
    model = loaded(full())
    engine = Engine(model, width=8)
    prompts = [prompt(10 + number, number) for number in range(6)]
    for number, tokens in enumerate(prompts):
        engine.submit(number, tokens, 20 + 15 * number)
    for _ in range(10):
        engine.step()
    engine.scheduler.retune(BatchTuning(2, 64, 128))
    engine.run()
    for number, tokens in enumerate(prompts):
        assert engine.tokens[number] == solo(model.model, tokens, 20 + 15 * number)
