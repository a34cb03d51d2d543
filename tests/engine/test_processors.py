"""Bias and penalties are mlx-lm's processors, for all rows at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlxd.engine.history import History
from mlxd.engine.sampling import RowSampler, process
from mlxd.wire import Sampling

VOCAB = 211
#: What mixtures are made of.
KINDS = (
    Sampling(seed=0),
    Sampling(seed=0, repetition_penalty=1.7),
    Sampling(seed=0, repetition_penalty=0.6, repetition_context_size=3),
    Sampling(seed=0, presence_penalty=1.5, presence_context_size=40),
    Sampling(seed=0, frequency_penalty=-0.75, frequency_context_size=64),
    Sampling(seed=0, logit_bias={0: -100.0, 7: 3.5, 210: 100.0}),
    Sampling(
        seed=0,
        repetition_penalty=1.2,
        repetition_context_size=100,
        presence_penalty=0.5,
        presence_context_size=1,
        frequency_penalty=1.1,
        frequency_context_size=5,
        logit_bias={token: token / 10 for token in range(30)},
    ),
)


def reference(logits: mx.array, tokens: list[int], s: Sampling) -> np.ndarray:
    """One row by mlx-lm's own processors."""
    made = make_logits_processors(
        s.logit_bias or None,
        s.repetition_penalty if s.repetition_penalty != 1 else None,
        s.repetition_context_size,
        s.presence_penalty,
        s.presence_context_size,
        s.frequency_penalty,
        s.frequency_context_size,
    )
    row = mx.array(np.array(logits)[None])
    for processor in made:
        row = processor(mx.array(tokens), row)
    return np.array(row[0])


def sequences(count: int, longest: int) -> list[list[int]]:
    """Token sequences of different lengths, in which tokens repeat."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, longest, count)
    return [random.integers(0, 25, length).tolist() for length in lengths]


def test_a_mixture_of_rows_equals_mlx_lm_row_by_row() -> None:
    """Every kind beside every other, with histories shorter and longer than the windows."""
    settings = [kind for kind in KINDS for _ in range(4)]
    tokens = sequences(len(settings), 150)
    rows = [RowSampler.of(s, VOCAB) for s in settings]
    history = History(len(rows))
    history.fit(max(row.window for row in rows))
    for slot, (row, sequence) in enumerate(zip(rows, tokens, strict=True)):
        history.join(slot, sequence[-row.window :] if row.window else [])
    logits = mx.random.normal((len(rows), VOCAB), key=mx.random.key(2)) * 4
    found = np.array(process(logits, history.tokens, rows, [len(each) for each in tokens]))
    for number, (sequence, s) in enumerate(zip(tokens, settings, strict=True)):
        np.testing.assert_allclose(
            found[number], reference(logits[number], sequence, s), rtol=1e-6, atol=1e-6
        )


def test_rows_without_bias_or_penalty_are_not_touched_bit_for_bit() -> None:
    """Neither beside rows with them, nor alone, when nothing at all is computed."""
    logits = mx.random.normal((3, VOCAB), key=mx.random.key(4))
    plain = RowSampler.of(Sampling(seed=0, repetition_context_size=50), VOCAB)
    assert process(logits, History(3).tokens, [plain, None, plain], [9, 0, 9]) is logits
    history = History(3)
    history.join(1, list(range(20)))
    busy = RowSampler.of(KINDS[-1], VOCAB)
    found = process(logits, history.tokens, [plain, busy, None], [9, 20, 0])
    for row in (0, 2):
        assert mx.array_equal(found[row], logits[row])
    assert not mx.array_equal(found[1], logits[1])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_are_processed_in_full_precision(dtype: mx.Dtype) -> None:
    """A small bias is not lost in a large logit's rounding."""
    logits = mx.full((1, VOCAB), 100.0, dtype)
    row = RowSampler.of(Sampling(seed=0, logit_bias={3: 0.01}), VOCAB)
    found = process(logits, History(1).tokens, [row], [1])
    assert mx.argmax(found[0]).item() == 3


class TestHistory:
    """The last tokens of each slot."""

    def test_it_is_empty_until_a_row_needs_it_and_again_afterwards(self) -> None:
        """Pools whose rows have no penalties pay nothing."""
        history = History(4)
        history.join(0, [])
        history.push(mx.array([1, 2, 3, 4], mx.uint32))
        assert history.nbytes == 0
        history.join(1, [5, 6])
        assert history.nbytes > 0
        history.fit(0)
        assert history.nbytes == 0

    def test_tokens_enter_at_the_end_and_survive_growth_moves_and_resizing(self) -> None:
        """A row's last tokens are the same wherever it sits."""
        pool, other = History(2), History(4)
        pool.join(1, [1, 2, 3])
        for token in (4, 5):
            pool.push(mx.array([0, token], mx.uint32))
        pool.fit(100)  # a neighbour with a longer window
        pool.push(mx.array([0, 6], mx.uint32))
        other.join(2, [9] * 40)
        other.move(0, pool, 1)
        other.move(3, other, 0)
        other.resize(8)
        for slot, history in ((1, pool), (0, other), (3, other)):
            assert history.tokens[slot, -6:].tolist() == [1, 2, 3, 4, 5, 6]
        assert other.tokens[2, -40:].tolist() == [9] * 40
        other.resize(1)
        assert other.tokens[0, -6:].tolist() == [1, 2, 3, 4, 5, 6]
