"""The plain attention equals MLX's own, and takes its place only where it should."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama

from mlxd.engine.attention import attention, plain, seam
from tests.engine.tiny import MODELS, WINDOW, Engine, full, loaded, prompt, solo

ROWS, HEADS, GROUPS, DIM, VALUE_DIM, COLUMNS = 3, 6, 2, 16, 8, 11
SCALE = 0.3
NAME = "scaled_dot_product_attention"


def _inputs(tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(1)
    queries = mx.random.normal((ROWS, HEADS, tokens, DIM)).astype(dtype)
    keys = mx.random.normal((ROWS, GROUPS, COLUMNS, DIM)).astype(dtype)
    values = mx.random.normal((ROWS, GROUPS, COLUMNS, VALUE_DIM)).astype(dtype)
    return queries, keys, values


def _masks(tokens: int) -> dict[str, mx.array | str | None]:
    mx.random.seed(2)
    seen = mx.arange(COLUMNS)[None] <= mx.arange(COLUMNS - tokens, COLUMNS)[:, None]
    return {
        "none": None,
        "causal": "causal",
        "of tokens": seen,
        "of rows": (mx.arange(COLUMNS)[None] <= mx.array([[3], [10], [7]]))[:, None, None],
        "of heads": mx.random.uniform(shape=(1, HEADS, tokens, COLUMNS)) < 0.7,
        "additive": mx.random.normal((tokens, COLUMNS)),
    }


@pytest.mark.parametrize("name", list(_masks(1)))
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_plain_form_equals_the_fused_one_under_every_mask(name: str, tokens: int) -> None:
    """Grouped heads, values of another width, and all kinds of masks that mlx-lm's models pass."""
    queries, keys, values = _inputs(tokens)
    mask = _masks(tokens)[name]
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    given = plain(queries, keys, values, SCALE, mask)
    assert given.shape == expected.shape
    assert mx.allclose(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_what_it_was(dtype: mx.Dtype) -> None:
    """The softmax is computed in float32, and the answer has the values' dtype."""
    queries, keys, values = _inputs(1, dtype)
    mask = _masks(1)["of rows"]
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    given = plain(queries, keys, values, SCALE, mask)
    assert given.dtype == dtype
    assert mx.allclose(given, expected, rtol=2e-2, atol=2e-2)


def test_a_row_that_sees_nothing_is_finite() -> None:
    """A free slot's masked columns may hold anything; NaN would spread through reductions."""
    queries, keys, values = _inputs(1)
    nothing = mx.zeros((ROWS, 1, 1, COLUMNS), mx.bool_)
    assert mx.isfinite(plain(queries, keys, values, SCALE, nothing)).all()


def test_what_a_masked_column_holds_changes_nothing() -> None:
    """Not even where it is huge: the row before may have left anything there."""
    queries, keys, values = _inputs(1)
    mask = mx.arange(COLUMNS)[None, None, None] < COLUMNS - 1
    clean = plain(queries, keys, values, SCALE, mask)
    keys[:, :, -1] = 1e18
    values[:, :, -1] = 1e18
    assert mx.array_equal(plain(queries, keys, values, SCALE, mask), clean)


def test_it_takes_the_arguments_of_the_function_that_it_stands_for() -> None:
    """The contract with mlx-lm: another signature in a later version is found here."""
    ours = inspect.signature(attention).parameters
    theirs = inspect.signature(base.scaled_dot_product_attention).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_quantised_caches_and_sinks_stay_with_mlx_lm() -> None:
    """They need what only its own functions do."""
    queries, keys, values = _inputs(1)
    sinks = mx.random.normal((HEADS,))
    assert mx.allclose(
        attention(queries, keys, values, None, SCALE, None, sinks=sinks),
        base.scaled_dot_product_attention(queries, keys, values, None, SCALE, None, sinks=sinks),
    )
    with pytest.raises(ValueError, match="sinks"):  # only mlx-lm's own looks at `bits`
        attention(queries, keys, values, SimpleNamespace(bits=8), SCALE, None, sinks=sinks)


def test_the_seam_is_where_it_was_asked_for_and_leaves_no_trace() -> None:
    """The model's module has ours inside, and mlx-lm's own afterwards; `fused` changes nothing."""
    model = full()
    with seam(model, "fused") as replaced:
        assert replaced == 0
        assert vars(llama)[NAME] is base.scaled_dot_product_attention
    with seam(model, "auto") as replaced:
        assert replaced == 1
        assert vars(llama)[NAME] is attention
    assert vars(llama)[NAME] is base.scaled_dot_product_attention


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_batch_lane_with_the_seam_equals_solo_generation_without_it(
    make: Callable[[], nn.Module],
) -> None:
    """Prefill and steps through the plain form give mlx-lm's own tokens."""
    model = loaded(make())
    prompts = [prompt(length, seed) for seed, length in enumerate([3, WINDOW + 1, 90])]
    expected = [solo(model.model, tokens, 24) for tokens in prompts]
    with seam(model.model, "auto"):
        engine = Engine(model, width=4)
        for number, tokens in enumerate(prompts):
            engine.submit(number, tokens, 24)
        engine.run()
    assert [engine.tokens[number] for number in range(len(prompts))] == expected
