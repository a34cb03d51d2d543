"""Quantised KV: both lanes compute what mlx-lm computes with its own quantised cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import falcon_h1, gemma3_text, gpt_oss, llama
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from benchmarks.kv import Row, alone, bytes_per_token, divergence, on_slots
from mlxd.engine import loading, trial, warmup
from mlxd.engine.caches import GROUP_SIZE
from mlxd.engine.pool import Pool
from mlxd.engine.prefill import arrays_of
from mlxd.engine.prefix import BLOCK, PrefixCache
from mlxd.engine.runner import Runner
from mlxd.wire import BatchTuning, Lane, Start
from tests.engine.architectures import ARCHITECTURES, BASE, build
from tests.engine.tiny import WINDOW, Engine, full, loaded, prompt

HEAD = 64
BITS = pytest.mark.parametrize("bits", [8, 4])
#: Prompt length and tokens to generate; the first row outgrows its class amid the others.
REQUESTS = [(6, 84), (1, 9), (WINDOW + 5, 12), (40, 10), (WINDOW, 14), (3, 8)]
CLASS = 80


def _config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **BASE, **ARCHITECTURES.get(model_type, {}), **more}


def wide() -> nn.Module:
    """Full attention in every layer, heads of one group."""
    return llama.Model(llama.ModelArgs.from_dict(_config("llama", head_dim=HEAD, layer_types=None)))


def windowed() -> nn.Module:
    """Full attention beside windows, which stay at model precision."""
    fields = _config("gemma3_text", head_dim=HEAD, num_hidden_layers=4, sliding_window_pattern=2)
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(fields))


def recurrent() -> nn.Module:
    """Attention and recurrent state in one list of caches."""
    return falcon_h1.Model(falcon_h1.ModelArgs.from_dict(_config("falcon_h1", head_dim=HEAD)))


MODELS = pytest.mark.parametrize("make", [wide, windowed, recurrent], ids=lambda m: m.__name__)


def own_caches(model: nn.Module, bits: int) -> list[Any]:
    """mlx-lm's own caches, quantised by its own method before the first token."""

    def quantised(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(quantised, cache.caches))
        return cache.to_quantized(GROUP_SIZE, bits) if isinstance(cache, KVCache) else cache

    return [quantised(cache) for cache in make_prompt_cache(model)]


def quantised_layers(caches: Any) -> int:
    """How many quantised caches there are, those in lists included."""
    return sum(
        quantised_layers(cache.caches)
        if isinstance(cache, CacheList)
        else isinstance(cache, QuantizedKVCache)
        for cache in caches
    )


def solo(model: nn.Module, bits: int, tokens: list[int], count: int) -> list[int]:
    """mlx-lm's own greedy generation with its own quantised cache."""
    steps = generate_step(
        mx.array(tokens), model, max_tokens=count, prompt_cache=own_caches(model, bits)
    )
    return [int(token) for token, _logprobs in steps]


@BITS
@MODELS
def test_rows_that_join_and_leave_equal_solo_generation(
    make: Callable[[], nn.Module], bits: int
) -> None:
    """Beyond the window and a capacity class, token for token."""
    model = loaded(make(), kv_bits=bits)
    assert quantised_layers(model.make_caches()) > 0
    assert trial.stepping(model) == "compiled"
    engine = Engine(model, chunk=32, smallest_class=CLASS)
    prompts = [prompt(length, 31 + number) for number, (length, _count) in enumerate(REQUESTS)]
    for number, (_length, count) in enumerate(REQUESTS):
        engine.submit(number, prompts[number], count)
        for _ in range(4):
            engine.step()
    engine.run()
    for number, (_length, count) in enumerate(REQUESTS):
        assert engine.tokens[number] == solo(model.model, bits, prompts[number], count), number


@BITS
def test_the_serial_lane_has_mlx_lms_quantised_cache_from_the_first_token(bits: int) -> None:
    """Its text is that of a quantised cache, not of the model's own."""
    model = loaded(wide(), kv_bits=bits)
    engine = Engine(model, chunk=32)
    tokens = prompt(70, 3)
    engine.submit(0, tokens, 30, lane=Lane.SERIAL)
    while not engine.tokens[0]:
        engine.step()
    per_token = bytes_per_token(model)
    assert engine.runner.kv_bytes == 256 * per_token  # mlx-lm's caches grow by so many
    engine.run()
    assert engine.tokens[0] == solo(model.model, bits, tokens, 30)


@BITS
def test_divergence_from_full_precision_is_that_of_mlx_lms_cache_in_every_row(bits: int) -> None:
    """Rows of different lengths together on slots; more than nothing, and no more than alone."""
    exact, model = loaded(wide()), loaded(wide(), kv_bits=bits)
    rows = [Row(prompt(n, n), prompt(12, 100 + n)) for n in (1, 5, 40, 90)]
    for row, found in zip(rows, on_slots(model, rows), strict=True):
        wanted = alone(exact, row)
        own = divergence(wanted, alone(model, row))
        assert own > 0
        assert divergence(wanted, found) <= own * 1.01 + 1e-6


def test_fewer_bits_diverge_further_and_take_less() -> None:
    """A token's bytes are the numbers', and a scale and a bias for each 64 of them."""
    models = [loaded(wide(), kv_bits=bits) for bits in (0, 8, 4)]
    row = Row(prompt(60, 1), prompt(12, 2))
    wanted, *others = [alone(model, row) for model in models]
    eight, four = (divergence(wanted, other) for other in others)
    assert 0 < eight < four
    heads = 2 * 2 * len(models[0].make_caches())  # keys and values, two heads, every layer
    assert [bytes_per_token(model) for model in models] == [
        heads * HEAD * 4,
        heads * (HEAD + 8),
        heads * (HEAD // 2 + 8),
    ]


@BITS
def test_the_account_of_rows_has_the_bytes_that_pools_take(bits: int) -> None:
    """What is promised of the KV budget is what a slot takes."""
    model = loaded(wide(), kv_bits=bits)
    assert model.layout is not None
    pool = Pool(model.layout, 64, 2)
    held = sum(array.nbytes for layer in pool.arrays() for array in layer)
    assert held == 2 * sum(spec.row_bytes(64) for spec in model.layout)
    assert held == 2 * 64 * bytes_per_token(model)


@BITS
def test_a_prefix_hit_equals_a_cold_start(bits: int) -> None:
    """Blocks hold the quantised columns themselves, for one row or several together."""
    model = loaded(wide(), kv_bits=bits)
    assert PrefixCache.supports(model.layout or [])
    engine = Engine(model, prefix_cache=2**22)
    common = prompt(70, 1)
    prompts = [common + prompt(10 + number, 2 + number) for number in range(4)]
    engine.submit(0, prompts[0], 10)
    engine.run()
    for number in range(1, 4):
        engine.submit(number, prompts[number], 10)
    engine.run()
    assert [engine.finished[number].cached_tokens for number in range(4)] == [0, 64, 64, 64]
    for number, tokens in enumerate(prompts):
        assert engine.tokens[number] == solo(model.model, bits, tokens, 10), number


@BITS
def test_restored_columns_are_the_computed_ones_bit_for_bit(bits: int) -> None:
    """Nothing is quantised twice."""
    model = loaded(wide(), kv_bits=bits)
    tokens = prompt(3 * BLOCK + 5, 1)
    caches = model.make_caches()
    mx.eval(model.model(mx.array([tokens]), cache=caches))
    cache = PrefixCache(model.layout or [], 2**22)
    cache.store(tokens, caches, 0)
    restored = cache.restore(tokens)
    assert restored is not None
    assert restored.length == 3 * BLOCK
    assert cache.nbytes == 3 * BLOCK * bytes_per_token(model)
    for found, own in zip(restored.caches, caches, strict=True):
        assert type(found) is QuantizedKVCache
        for a, b in zip(arrays_of([found]), arrays_of([own]), strict=True):
            assert mx.array_equal(a, b[:, :, : restored.length])


@pytest.mark.parametrize("make", [windowed, recurrent], ids=lambda make: make.__name__)
def test_snapshots_of_quantised_layers_equal_a_cold_start(make: Callable[[], nn.Module]) -> None:
    """Models whose other layers cannot be cut go on from where a prompt was."""
    model = loaded(make(), kv_bits=8)
    engine = Engine(model, prefix_cache=2**22)
    tokens = prompt(70, 1)
    engine.submit(0, tokens, 5)
    engine.run()
    engine.submit(1, [*tokens, *prompt(9, 2)], 10)
    engine.run()
    assert engine.finished[1].cached_tokens == 69
    assert engine.tokens[1] == solo(model.model, 8, [*tokens, *prompt(9, 2)], 10)


def test_warm_up_tells_the_bits_and_that_the_trait_can_be_batched() -> None:
    """The policy needs both."""
    model, tuning = loaded(wide(), kv_bits=4), BatchTuning(2, 32, 64)
    found = warmup.run(Runner(model, tuning), model, tuning).capabilities
    assert found.kv_bits == 4
    assert found.serial_only is None
    assert "kv_quant" in found.batchable
    assert found.row_bytes[0][1] == found.row_bytes[0][0] * bytes_per_token(model)


def saved(folder: Path, model: nn.Module, config: dict[str, Any]) -> Start:
    """The model on disk, and the frame that loads it with 8 bits."""
    mx.eval(model.parameters())
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return Start(
        model_path=str(folder),
        dtype="float32",
        context=None,
        trust_remote_code=False,
        batch=BatchTuning(2, 32, 64),
        kv_bits=8,
    )


def test_loading_makes_quantised_caches(tmp_path: Path) -> None:
    """And says which classes there are."""
    start = saved(tmp_path, wide(), _config("llama", head_dim=HEAD, layer_types=None))
    found = loading.load(start)
    assert found.kv_bits == 8
    assert found.cache_classes == ["QuantizedKVCache"]


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("qwen3", {}, "heads of 8 numbers; groups of 64 are quantised"),
        ("mamba2", {}, "no layer has full attention"),
        ("gpt_oss", {"head_dim": HEAD}, "does not support attention sinks"),
    ],
)
def test_what_cannot_be_quantised_fails_to_load_and_says_why(
    tmp_path: Path, name: str, more: dict[str, Any], why: str
) -> None:
    """The key, the model and the reason are named."""
    config = _config(name, **more)
    model = build(name)
    if more:
        model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(config))
    start = saved(tmp_path, model, config)
    with pytest.raises(ValueError, match=why) as caught:
        loading.load(start)
    assert f"batch.kv_bits = 8 cannot be had with {tmp_path.name} ({name})" in str(caught.value)


def test_without_kv_bits_nothing_is_quantised() -> None:
    """The default is the model's own cache."""
    assert all(type(cache) is KVCache for cache in loaded(full()).make_caches())
