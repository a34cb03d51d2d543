"""Sampling draws from the distribution that mlx-lm's own filters define."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from mlxd.engine.sampling import Draw, RowSampler, sample, uniform
from mlxd.wire import Sampling

DRAWS = 1024
#: Each token's share of the draws may be off by so much: they fill a square evenly.
TOLERANCE = 4 / DRAWS
LARGE, SMALL = 20_001, 97  # with blocks that need padding; too small for the narrow program


def reference(logits: mx.array, settings: Sampling) -> np.ndarray:
    """Probabilities [vocabulary] by mlx-lm's functions, in its order."""
    logprobs = logits - mx.logsumexp(logits)
    logprobs = logprobs[None]
    if 0 < settings.top_p < 1:
        logprobs = apply_top_p(logprobs, settings.top_p)
    if settings.min_p:
        logprobs = apply_min_p(logprobs, settings.min_p)
    if settings.xtc_probability:
        # Its own coin always falls on the side of removal.
        logprobs = apply_xtc(logprobs, 1.0, settings.xtc_threshold, settings.xtc_special)
    if settings.top_k:
        logprobs = apply_top_k(logprobs, settings.top_k)
    probabilities: np.ndarray = np.array(mx.softmax(logprobs / settings.temperature, axis=-1))[0]
    return probabilities


def drawn(logits: mx.array, settings: Sampling) -> np.ndarray:
    """Share [vocabulary] of evenly spread draws that each token gets."""
    row = RowSampler.of(settings, logits.shape[-1])
    many = mx.broadcast_to(logits[None], (DRAWS, logits.shape[-1]))
    xtc = settings.xtc_probability > 0
    golden = (5**0.5 - 1) / 2
    draws = [Draw((i + 0.5) / DRAWS, i * golden % 1, xtc) for i in range(DRAWS)]
    tokens = sample(many, [row] * DRAWS, draws)
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
        Sampling(seed=0, xtc_probability=1.0, xtc_threshold=0.01),
        Sampling(seed=0, xtc_probability=1.0, xtc_threshold=0.02, xtc_special=[3, 40, 96]),
        Sampling(seed=0, xtc_probability=1.0, xtc_threshold=0.03, top_p=0.4, top_k=12, min_p=0.05),
        Sampling(seed=0, xtc_probability=1.0, xtc_threshold=0.01, top_k=1),
        Sampling(seed=0, xtc_probability=1.0, xtc_threshold=0.5),
    ],
    ids=lambda s: f"t{s.temperature}-p{s.top_p}-k{s.top_k}-m{s.min_p}-x{s.xtc_threshold}",
)
def test_every_filter_gives_mlx_lms_distribution(settings: Sampling, vocabulary: int) -> None:
    """Evenly spread draws land on each token in proportion to its probability there."""
    logits = mx.random.normal((vocabulary,), key=mx.random.key(7)) * 3
    expected = reference(logits, settings)
    difference = np.abs(drawn(logits, settings) - expected)
    assert difference.max() <= TOLERANCE
    assert set(np.flatnonzero(drawn(logits, settings))) <= set(np.flatnonzero(expected))


def test_a_top_k_beyond_the_narrow_limit_is_still_exact() -> None:
    """No cap changes results: a top_k of 1,500 keeps 1,500 tokens."""
    logits = mx.random.normal((LARGE,), key=mx.random.key(3))
    settings = Sampling(seed=0, top_k=1500, temperature=2.0)
    expected = reference(logits, settings)
    assert set(np.flatnonzero(drawn(logits, settings))) <= set(np.flatnonzero(expected))
    assert np.abs(drawn(logits, settings) - expected).max() <= TOLERANCE


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
    draws = [Draw(number, 1 - number) for number in (0.1, 0.5, 0.0, 0.7, 0.9, 0.999)]
    together = np.array(sample(logits, rows, draws))
    for i in (0, 1, 3, 4, 5):
        assert together[i] == sample(logits[i : i + 1], [rows[i]], [draws[i]]).item()


def test_the_largest_draw_stays_inside_the_kept_tokens() -> None:
    """A draw just below 1 never falls off the end of the distribution."""
    logits = mx.random.normal((LARGE,), key=mx.random.key(5))
    almost_one = 1 - 2.0**-24
    for settings in (Sampling(seed=0), Sampling(seed=0, top_k=40), Sampling(seed=0, top_p=0.3)):
        token = sample(
            logits[None], [RowSampler.of(settings, LARGE)], [Draw(almost_one, almost_one)]
        )
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


def test_xtc_acts_with_its_probability_and_leaves_other_draws_as_they_are() -> None:
    """Its coin is a stream of its own, so that the draw itself is the row's usual one."""
    plain = RowSampler.of(Sampling(seed=11), LARGE)
    row = RowSampler.of(Sampling(seed=11, xtc_probability=0.3), LARGE)
    draws = [row.draw(position) for position in range(4000)]
    assert abs(sum(draw.xtc for draw in draws) / 4000 - 0.3) < 0.03
    assert [draw.number for draw in draws] == [plain.draw(p).number for p in range(4000)]


def test_tokens_that_a_mask_forbids_are_never_drawn() -> None:
    """Minus infinity stays impossible in every program, also where a filter wants more tokens."""
    logits = mx.full((LARGE,), -mx.inf)
    logits[17], logits[LARGE - 1] = 0.0, -1.0
    many = mx.broadcast_to(logits[None], (64, LARGE))
    for settings in (
        Sampling(seed=0, temperature=0.0),
        Sampling(seed=0, top_k=50),
        Sampling(seed=0, top_k=50, top_p=0.99),
        Sampling(seed=0, top_k=5000, top_p=0.99),
        Sampling(seed=0, temperature=2.0),
        Sampling(seed=0, xtc_probability=1.0),
    ):
        rows = [RowSampler.of(settings, LARGE)] * 64
        draws = [Draw(i / 64, i / 64, xtc=settings.xtc_probability > 0) for i in range(63)]
        tokens = np.array(sample(many, rows, [*draws, Draw(1 - 2.0**-24, 1 - 2.0**-24)]))
        assert set(tokens.tolist()) <= {17, LARGE - 1}, settings


def test_the_last_bits_of_logits_rarely_move_a_draw() -> None:
    """Other batch widths round differently: of flat rows, too, nearly all draws stay.

    One number in one cumulative sum would move a tenth of these.
    """
    logits = mx.random.normal((256, 49_152), key=mx.random.key(9))
    numbers = mx.arange(49_152)
    noise = mx.where(numbers < 24_576, 1e-5, 0) + mx.where(numbers % 384 < 192, 1e-5, 0)
    row = RowSampler.of(Sampling(seed=3), logits.shape[1])
    draws = [row.draw(position) for position in range(256)]
    plain, moved = (np.array(sample(x, [row] * 256, draws)) for x in (logits, logits + noise))
    assert (plain != moved).sum() <= 2
