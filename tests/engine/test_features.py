"""Whatever a request asks of sampling, the batch lane gives what the serial lane gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxd.engine.pool import SMALLEST_CLASS
from mlxd.engine.pools import SHRINK_AFTER
from mlxd.wire import Lane, Sampling, TokenLogprobs
from tests.engine.tiny import VOCAB, Engine, full, loaded, mixed_gemma3, prompt

#: One request of each kind; those with a temperature have their own seeds.
KINDS = {
    "greedy": Sampling(seed=0, temperature=0.0),
    "seeded": Sampling(seed=5, temperature=0.9),
    "narrow": Sampling(seed=6, top_k=20, top_p=0.8),
    "nucleus": Sampling(seed=7, temperature=0.7, top_p=0.9),
    "min_p": Sampling(seed=8, min_p=0.05, temperature=1.5),
    "xtc": Sampling(seed=9, xtc_probability=0.5, xtc_threshold=0.05, xtc_special=[1, 2]),
    "bias": Sampling(seed=0, temperature=0.0, logit_bias={3: 2.0, 9: -100.0, 50: 1.0}),
    "repetition": Sampling(
        seed=0, temperature=0.0, repetition_penalty=1.8, repetition_context_size=64
    ),
    "presence": Sampling(seed=10, presence_penalty=1.5),
    "frequency": Sampling(
        seed=0, temperature=0.0, frequency_penalty=0.8, frequency_context_size=300
    ),
    "logprobs": Sampling(seed=0, temperature=0.0, logprobs=5, presence_penalty=0.7),
    "chosen": Sampling(seed=11, logprobs=0),
}


def close(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> bool:
    """Whether both lanes tell the same log-probabilities."""
    if found is None or expected is None:
        return found is expected
    return (
        [token for token, _ in found.top] == [token for token, _ in expected.top]
        and found.chosen == pytest.approx(expected.chosen, abs=1e-4)
        and [p for _, p in found.top] == pytest.approx([p for _, p in expected.top], abs=1e-4)
    )


@pytest.mark.parametrize("make", [full, mixed_gemma3], ids=lambda make: make.__name__)
def test_every_kind_beside_all_others_equals_itself_in_the_serial_lane(make) -> None:
    """More requests than slots, joining and leaving at different steps, over class borders."""
    model = loaded(make())
    names = list(KINDS)
    lengths = [1, 2, 30, SMALLEST_CLASS - 10, 70, 5, 40, SMALLEST_CLASS - 20, 25, 60, 15, 33]
    counts = [40, 30, 55, 60, 25, 45, 50, 64, 35, 70, 40, 30]
    requests = [
        (prompt(length, seed), count, KINDS[name])
        for seed, (name, length, count) in enumerate(zip(names, lengths, counts, strict=True))
    ]
    batch = Engine(model, width=5)
    for number, (tokens, count, sampling) in enumerate(requests):
        batch.submit(number, tokens, count, sampling=sampling)
        for _ in range(3):
            batch.step()
    batch.run()
    serial = Engine(model)
    for number, (tokens, count, sampling) in enumerate(requests):
        serial.submit(number, tokens, count, sampling=sampling, lane=Lane.SERIAL)
    serial.run()
    for number, name in enumerate(names):
        assert batch.tokens[number] == serial.tokens[number], name
        pairs = zip(batch.logprobs[number], serial.logprobs[number], strict=True)
        assert all(close(found, expected) for found, expected in pairs), name


def alone(model, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """The request with nobody beside it."""
    engine = Engine(model)
    engine.submit(0, tokens, count, sampling=sampling)
    engine.run()
    return engine.tokens[0]


@pytest.mark.parametrize("name", ["seeded", "xtc", "repetition", "frequency"])
def test_a_row_that_outlives_its_neighbours_keeps_its_draws_and_its_history(name: str) -> None:
    """The pool widens, narrows and hands the row on to a larger class under it."""
    model = loaded(full())
    tokens = prompt(SMALLEST_CLASS - 60, 1)
    expected = alone(model, tokens, 120, KINDS[name])
    engine = Engine(model, width=8)
    for number in range(7):  # they hold the lower slots and leave first
        engine.submit(number, prompt(20, number), 10)
    engine.submit(7, tokens, 120, sampling=KINDS[name])
    engine.run()
    assert 10 + SHRINK_AFTER < 120, "it outlives the others long enough for the pool to narrow"
    assert engine.tokens[7] == expected
    assert set(expected) != {expected[0]}
    assert max(expected) < VOCAB
