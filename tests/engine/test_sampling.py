"""Sampling draws from the distribution that mlx-lm's own filters define."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlxd.engine.sampling import RowSampler, sample, uniform
from mlxd.wire import Sampling

DRAWS = 512
LARGE, SMALL = 20_001, 97  # with blocks that need padding; too small for the narrow program


def reference(logits: mx.array, settings: Sampling) -> np.ndarray:
    """Probabilities [vocabulary] by mlx-lm's functions, in its order."""
    logprobs = logits - mx.logsumexp(logits)
    logprobs = logprobs[None]
    if 0 < settings.top_p < 1:
        logprobs = apply_top_p(logprobs, settings.top_p)
    if settings.min_p:
        logprobs = apply_min_p(logprobs, settings.min_p)
    if settings.top_k:
        logprobs = apply_top_k(logprobs, settings.top_k)
    probabilities: np.ndarray = np.array(mx.softmax(logprobs / settings.temperature, axis=-1))[0]
    return probabilities


def drawn(logits: mx.array, settings: Sampling) -> np.ndarray:
    """Share [vocabulary] of evenly spaced draws that each token gets."""
    row = RowSampler.of(settings, logits.shape[-1])
    many = mx.broadcast_to(logits[None], (DRAWS, logits.shape[-1]))
    tokens = sample(many, [row] * DRAWS, [(i + 0.5) / DRAWS for i in range(DRAWS)])
    return np.bincount(np.array(tokens), minlength=logits.shape[-1]) / DRAWS


@pytest.mark.parametrize("vocabulary", [LARGE, SMALL])
@pytest.mark.parametrize(
    "settings",
    [
        Sampling(seed=0, temperature=0.7),
        Sampling(seed=0, top_p=0.9),
        Sampling(seed=0, top_p=0.05),
        Sampling(seed=0, min_p=0.1, temperature=1.5),
        Sampling(seed=0, top_k=20, temperature=0.5),
        Sampling(seed=0, top_k=20, top_p=0.8, temperature=1.2),
        Sampling(seed=0, top_k=60, top_p=0.99, min_p=0.02),
        Sampling(seed=0, top_k=1, temperature=1.5),
    ],
    ids=lambda s: f"t{s.temperature}-p{s.top_p}-k{s.top_k}-m{s.min_p}",
)
def test_every_filter_gives_mlx_lms_distribution(settings: Sampling, vocabulary: int) -> None:
    """Evenly spaced draws land on each token in proportion to its probability there."""
    logits = mx.random.normal((vocabulary,), key=mx.random.key(7)) * 3
    expected = reference(logits, settings)
    difference = np.abs(drawn(logits, settings) - expected)
    assert difference.max() <= 1.5 / DRAWS
    assert set(np.flatnonzero(drawn(logits, settings))) <= set(np.flatnonzero(expected))


def test_a_top_k_beyond_the_narrow_limit_is_still_exact() -> None:
    """No cap changes results: a top_k of 1,500 keeps 1,500 tokens."""
    logits = mx.random.normal((LARGE,), key=mx.random.key(3))
    settings = Sampling(seed=0, top_k=1500, temperature=2.0)
    expected = reference(logits, settings)
    assert set(np.flatnonzero(drawn(logits, settings))) <= set(np.flatnonzero(expected))
    assert np.abs(drawn(logits, settings) - expected).max() <= 1.5 / DRAWS


def test_rows_of_different_programs_keep_their_own_settings_in_one_call() -> None:
    """Greedy, narrow, wide and free slots side by side draw as they do alone."""
    logits = mx.random.normal((6, LARGE), key=mx.random.key(1)) * 2
    rows = [
        RowSampler.of(Sampling(seed=0, temperature=0.0), LARGE),
        RowSampler.of(Sampling(seed=0, top_k=50, top_p=0.9), LARGE),
        None,
        RowSampler.of(Sampling(seed=0, top_p=0.9), LARGE),
        RowSampler.of(Sampling(seed=0, temperature=3.0), LARGE),
        RowSampler.of(Sampling(seed=0, top_k=3), LARGE),
    ]
    draws = [0.1, 0.5, 0.0, 0.7, 0.9, 0.999]
    together = sample(logits, rows, draws).tolist()
    alone = [sample(logits[i : i + 1], rows[i : i + 1], draws[i : i + 1]).item() for i in range(6)]
    assert together == alone
    assert together[2] == mx.argmax(logits[2]).item()


def test_the_largest_draw_stays_inside_the_kept_tokens() -> None:
    """A draw just below 1 never falls off the end of the distribution."""
    logits = mx.random.normal((LARGE,), key=mx.random.key(5))
    almost_one = 1 - 2.0**-24
    for settings in (Sampling(seed=0), Sampling(seed=0, top_k=40), Sampling(seed=0, top_p=0.3)):
        token = sample(logits[None], [RowSampler.of(settings, LARGE)], [almost_one])
        assert reference(logits, settings)[np.array(token)[0]] > 0


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """The same pair gives the same number; neighbours of either give unrelated ones."""
    assert uniform(1, 5) == uniform(1, 5)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) > 2490
    values = np.array([uniform(seed, 0) for seed in range(4000)])
    assert abs(values.mean() - 0.5) < 0.02
    assert values.min() >= 0
    assert values.max() < 1


def test_streams_of_neighbouring_seeds_are_not_shifted_copies() -> None:
    """A seed that differs by the generator's own increment shares no run with the other."""
    step = 0x9E3779B97F4A7C15
    first = [uniform(10, position) for position in range(20)]
    second = [uniform(10 + step, position) for position in range(20)]
    assert not set(first) & set(second)


def test_top_k_of_one_is_greedy_whatever_the_temperature() -> None:
    """The batch need not draw for a row that has one candidate."""
    assert RowSampler.of(Sampling(seed=0, temperature=1.5, top_k=1), LARGE).program == "greedy"


def test_top_k_at_or_above_the_vocabulary_is_off() -> None:
    """Such a row draws from everything."""
    assert RowSampler.of(Sampling(seed=0, top_k=SMALL), SMALL).program == "wide"
