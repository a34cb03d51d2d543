"""Log-probabilities in the batch are those of mlx-lm's generator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxd.engine.sampling import RowSampler, observe
from mlxd.wire import Sampling

VOCABULARIES = [97, 5000]


def sampler(logprobs: int | None, vocabulary: int) -> RowSampler:
    """A row that asked for so many, or not at all."""
    return RowSampler.of(Sampling(seed=0, logprobs=logprobs), vocabulary)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rows_that_asked_get_the_chosen_and_the_best_and_others_nothing(vocabulary: int) -> None:
    """Normalised over the vocabulary, best first, as many as each row wanted."""
    logits = mx.random.normal((5, vocabulary), key=mx.random.key(0)) * 5
    rows = [sampler(2, vocabulary), None, sampler(0, vocabulary), sampler(None, vocabulary)]
    rows.append(sampler(20, vocabulary))
    tokens = [3, 0, 90, 5, 7]
    observed = observe(logits, mx.array(tokens, mx.uint32), rows)
    assert observed is not None
    found = observed.read()
    assert set(found) == {0, 2, 4}
    exact = np.array(logits).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    for row, count in ((0, 2), (2, 0), (4, 20)):
        assert found[row].chosen == pytest.approx(exact[row, tokens[row]], abs=1e-5)
        ids = [token for token, _logprob in found[row].top]
        assert ids == np.argsort(-exact[row])[:count].tolist()
        values = [logprob for _token, logprob in found[row].top]
        np.testing.assert_allclose(values, exact[row, ids], atol=1e-5)


def test_nothing_is_computed_when_no_row_asked() -> None:
    """Most steps."""
    logits = mx.zeros((2, 97))
    assert observe(logits, mx.zeros((2,), mx.uint32), [sampler(None, 97), None]) is None


def test_impossible_tokens_are_not_among_the_best() -> None:
    """When fewer tokens are possible than were asked for, fewer are told: JSON has no infinity."""
    logits = mx.full((1, 97), -mx.inf)
    logits[0, 5] = 1.0
    observed = observe(logits, mx.array([5], mx.uint32), [sampler(3, 97)])
    assert observed is not None
    found = observed.read()[0]
    assert found.chosen == pytest.approx(0.0, abs=1e-6)
    assert [token for token, _logprob in found.top] == [5]
    assert found.top[0][1] == pytest.approx(0.0, abs=1e-6)
