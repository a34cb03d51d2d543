"""Arithmetic over whole vocabularies."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxd.engine.sampling import numeric


def test_exp_is_as_accurate_as_a_float_can_tell() -> None:
    """Relative error below 1e-6 down to the smallest normal number, then 0."""
    values = np.concatenate([np.linspace(-87, 0, 200_001), [-88.0, -1e4, numeric.LOWEST, -np.inf]])
    found = np.array(numeric.exp(mx.array(values.astype(np.float32))[None]))[0]
    exact = np.exp(values.astype(np.float32).astype(np.float64))
    assert np.abs(found[:-4] / exact[:-4] - 1).max() < 1e-6
    assert found[-4:].tolist() == [0, 0, 0, 0]
    assert found[-5] == 1


@pytest.mark.parametrize("vocabulary", [5, 128, 1000, 49_152])
def test_padding_changes_no_sum_and_no_maximum(vocabulary: int) -> None:
    """What is added weighs nothing."""
    logits = mx.random.normal((3, vocabulary), key=mx.random.key(0))
    padded = numeric.padded(logits)
    assert padded.shape[1] % numeric.FOLD == 0
    exact = np.exp(np.array(logits).astype(np.float64))
    best = numeric.best(padded)
    assert mx.array_equal(best, logits.max(axis=-1, keepdims=True))
    total = numeric.total(numeric.exp(padded - best)) * mx.exp(best)
    np.testing.assert_allclose(np.array(total)[:, 0], exact.sum(axis=-1), rtol=3e-6)


def test_a_rows_sum_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, alone and in any place among others."""
    values = mx.random.uniform(shape=(7, 49_152), key=mx.random.key(1))
    together = numeric.total(values)
    for row in range(7):
        assert mx.array_equal(numeric.total(values[row : row + 1])[0], together[row])
        shuffled = mx.concatenate([values[3:], values[row : row + 1]])
        assert mx.array_equal(numeric.total(shuffled)[-1], together[row])


def test_only_values_above_zero_keep_their_weight() -> None:
    """However little above; infinities too."""
    values = mx.array([[-mx.inf, -1.0, -1e-12, 0.0, 1e-12, 1.0, mx.inf]])
    weights = mx.full(values.shape, 0.75)
    kept = np.array(numeric.where_positive(values, weights))[0]
    assert kept.tolist() == [0, 0, 0, 0, 0.75, 0.75, 0.75]
