"""The batch lane computes, over mlx-lm's architectures, what mlx-lm computes alone.

Tiny models with random float32 weights; every cache class that has slots is among them.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxd.engine import trial
from tests.engine.architectures import ARCHITECTURES, build
from tests.engine.tiny import WINDOW, Engine, loaded, prompt, solo

#: What has to go serial, and why. It may only shrink.
SERIAL = {
    "afm7": "its shared layers take positions from the number of columns",
    "gemma2": "its mask has no axis for the rows of a batch beside the groups of heads",
    "gpt_bigcode": "it makes positions with numpy",
    "llama4": "it cuts its chunked mask from the offset as one number",
    "recurrent_gemma": "it scales a first token in its own way, which no state stands for",
}
MOST_SERIAL = 5
BATCH = sorted(set(ARCHITECTURES) - set(SERIAL))

#: Tokens of the first capacity class: small, so that a row crosses it soon.
CLASS = 80
#: Prompt length and tokens to generate. The first row outgrows its class, and is in
#: mid-generation while all others join and leave; the second has no state to begin with.
REQUESTS = [(6, 84), (1, 9), (WINDOW + 5, 12), (40, 10), (WINDOW, 14), (3, 8)]
TOGETHER = 3


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    yield
    mx.clear_cache()


@pytest.mark.parametrize("name", BATCH)
def test_rows_that_join_and_leave_equal_solo_generation(name: str) -> None:
    """Beyond the window and a capacity class, in slots that others left, token for token."""
    model = loaded(build(name))
    assert model.layout is not None
    engine = Engine(model, width=4, chunk=32, smallest_class=CLASS)
    stepping = trial.stepping(model)
    assert stepping is not None
    engine.runner.compiles = stepping == "compiled"
    prompts = [prompt(length, 31 + number) for number, (length, _count) in enumerate(REQUESTS)]
    joined, left = _run(engine, prompts)
    assert joined >= 3
    assert left >= 2
    for number, (_length, count) in enumerate(REQUESTS):
        assert engine.finished[number].error is None
        assert engine.tokens[number] == solo(model.model, prompts[number], count), number


def _run(engine: Engine, prompts: list[list[int]]) -> tuple[int, int]:
    """Run all requests, the later ones submitted one by one while the first ones run.

    Returns:
        How many joined, and how many left, while another was in mid-generation.
    """
    joined = left = 0
    waiting = iter(range(len(REQUESTS)))
    for number in (next(waiting) for _ in range(TOGETHER)):
        engine.submit(number, prompts[number], REQUESTS[number][1])
    steps = 0
    while not engine.scheduler.idle or len(engine.tokens) < len(REQUESTS):
        before = {number: len(tokens) for number, tokens in engine.tokens.items()}
        ended = set(engine.finished)
        engine.step()
        steps += 1
        for number in engine.tokens:
            amid = any(
                count > 0 and other != number and other not in engine.finished
                for other, count in before.items()
            )
            joined += amid and before[number] == 0 and len(engine.tokens[number]) > 0
            left += amid and number in engine.finished and number not in ended
        if steps % 8 == 0 and (following := next(waiting, None)) is not None:
            engine.submit(following, prompts[following], REQUESTS[following][1])
    return joined, left


@pytest.mark.parametrize("name", SERIAL)
def test_a_model_that_slots_would_change_is_found_out_at_load(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It fails on slots, gives other logits there, or has a cache class without slots."""
    model = loaded(build(name))
    assert model.layout is None or trial.stepping(model) is None
    assert model.layout is None or "slots" in capfd.readouterr().err


def test_nearly_all_architectures_run_in_the_batch_lane() -> None:
    """The list of those that cannot only shrinks."""
    assert set(SERIAL) < set(ARCHITECTURES)
    assert len(BATCH) >= 60
    assert len(SERIAL) <= MOST_SERIAL


def test_every_cache_class_with_slots_is_among_them() -> None:
    """Full, sliding, recurrent, and lists of them."""
    names = ["llama", "mamba2", "falcon_h1", "deepseek_v32"]
    classes = {name for each in names for name in loaded(build(each)).cache_classes}
    assert classes == {"KVCache", "RotatingKVCache", "ArraysCache", "CacheList"}
