"""The prefix cache gives back what was computed, once for all who share it, within its bytes."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxd.engine.loading import LoadedModel
from mlxd.engine.prefill import arrays_of
from mlxd.engine.prefix import BLOCK, PrefixCache, Restored, batched
from mlxd.engine.slots import FullSpec
from tests.engine.tiny import MODELS, full, full_qwen3, loaded, prompt, solo

ROOMY = 1 << 24
#: Two shapes of layers, interleaved.
WIDE = FullSpec(2, 8, 8, mx.float32)
NARROW = FullSpec(1, 4, 6, mx.float16)
LAYOUT = (WIDE, NARROW, WIDE, WIDE)
BLOCK_BYTES = sum(spec.row_bytes(BLOCK) for spec in LAYOUT)


def state_of(tokens: Sequence[int]) -> list[KVCache]:
    """Made-up state in which a column depends on all tokens up to it, as a model's would."""
    columns = (mx.cumsum(mx.array(list(tokens))) % 1009)[None, None, :, None]
    caches = []
    for layer, spec in enumerate(LAYOUT):
        heads = mx.arange(spec.heads)[None, :, None, None]
        keys = columns + heads + mx.arange(spec.key_dim) + layer
        values = columns * 2 - heads - mx.arange(spec.value_dim) - layer
        cache = KVCache()
        cache.state = (keys.astype(spec.dtype), values.astype(spec.dtype), len(tokens))
        caches.append(cache)
    return caches


def remembering(*prompts: Sequence[int], blocks: int = 1000) -> PrefixCache:
    """A cache of so many blocks at most that has seen these prompts in order."""
    cache = PrefixCache(LAYOUT, blocks * BLOCK_BYTES)
    for tokens in prompts:
        cache.store(tokens, state_of(tokens), 0)
    return cache


def known(cache: PrefixCache, tokens: Sequence[int]) -> int:
    """How many of a prompt's tokens can be restored if one more follows. Counts as a use."""
    restored = cache.restore([*tokens, 0])
    return 0 if restored is None else restored.length


def prefilled(model: nn.Module, *rows: Sequence[int]) -> list[KVCache]:
    """The model's own state of a batch of equally long rows."""
    caches = make_prompt_cache(model)
    model(mx.array([list(row) for row in rows]), cache=caches)
    mx.eval(arrays_of(caches))
    return caches


def computed(model: LoadedModel, tokens: Sequence[int]) -> PrefixCache:
    """A roomy cache that has seen the model prefill this prompt."""
    assert model.layout is not None
    cache = PrefixCache(model.layout, ROOMY)
    cache.store(tokens, prefilled(model.model, tokens), 0)
    return cache


def restored_from(cache: PrefixCache, tokens: Sequence[int]) -> Restored:
    """What is known of a prompt, which must be something."""
    restored = cache.restore(tokens)
    assert restored is not None
    return restored


def assert_same(one: Sequence[KVCache], other: Sequence[KVCache], length: int) -> None:
    """The first `length` columns are equal, bit for bit, in every layer."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left.state[:2], right.state[:2], strict=True):
            assert a.dtype == b.dtype
            assert a.shape[2] >= length
            assert mx.array_equal(a[:, :, :length], b[:, :, :length])


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_only_models_with_full_attention_in_every_layer_are_supported(make) -> None:
    """A layout with a window anywhere, or with no layers, is refused."""
    layout = loaded(make()).layout
    assert layout is not None
    supported = make in {full, full_qwen3}
    assert PrefixCache.supports(layout) is supported
    if not supported:
        with pytest.raises(ValueError, match="full attention"):
            PrefixCache(layout, ROOMY)


def test_a_layout_without_layers_is_not_supported() -> None:
    """Such a model has no slots, so nothing could be restored into them."""
    assert not PrefixCache.supports([])


def test_an_empty_cache_restores_nothing() -> None:
    """There is no state of length zero."""
    assert PrefixCache(LAYOUT, ROOMY).restore(prompt(100, 1)) is None


def test_the_restored_state_equals_the_computed_one() -> None:
    """Whole blocks of a prefilled prompt come back bit for bit, in mlx-lm's own caches."""
    model = loaded(full())
    tokens = prompt(3 * BLOCK + 5, 1)
    restored = restored_from(computed(model, tokens), tokens)
    assert restored.length == 3 * BLOCK
    assert [cache.offset for cache in restored.caches] == [3 * BLOCK] * 3
    assert all(type(cache) is KVCache for cache in restored.caches)
    assert all(cache.state[0].shape[2] == 3 * BLOCK for cache in restored.caches)
    assert_same(restored.caches, prefilled(model.model, tokens), restored.length)


def test_layers_of_different_shapes_come_back_in_their_order() -> None:
    """Grouping layers by shape mixes up neither their order nor their dtypes."""
    tokens = prompt(2 * BLOCK, 1)
    restored = restored_from(remembering(tokens), [*tokens, 0])
    assert_same(restored.caches, state_of(tokens), 2 * BLOCK)


@pytest.mark.parametrize("make", [full, full_qwen3], ids=lambda make: make.__name__)
@pytest.mark.parametrize("length", [BLOCK + 1, 5 * BLOCK, 20 * BLOCK + 3])
def test_generation_from_a_restored_prefix_equals_solo(make, length: int) -> None:
    """Another prompt that begins alike goes on as if it had been computed alone."""
    model = loaded(make())
    cache = computed(model, prompt(length, 2))
    tokens = prompt(length, 2)[: length - 1] + prompt(9, 3)
    restored = restored_from(cache, tokens)
    rest = mx.array(tokens[restored.length :])
    steps = generate_step(rest, model.model, max_tokens=30, prompt_cache=restored.caches)
    assert [token for token, _logprobs in steps] == solo(model.model, tokens, 30)


def test_a_common_prefix_of_different_prompts_is_held_once() -> None:
    """Bytes grow only by the blocks in which a prompt differs."""
    shared = prompt(4 * BLOCK, 1)
    cache = remembering(shared + prompt(2 * BLOCK, 2))
    assert cache.nbytes == 6 * BLOCK_BYTES
    other = shared + prompt(3 * BLOCK, 3)
    assert known(cache, other) == len(shared)
    cache.store(other, state_of(other), 0)
    assert (cache.blocks, cache.nbytes) == (9, 9 * BLOCK_BYTES)
    assert known(cache, other) == len(other)


@pytest.mark.parametrize(
    ("length", "expected"), [(2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK), (BLOCK, 0), (1, 0)]
)
def test_an_exact_hit_leaves_at_least_the_last_token(length: int, expected: int) -> None:
    """The decode step needs a token to compute, so the last one's block is not restored."""
    tokens = prompt(3 * BLOCK, 1)
    restored = remembering(tokens).restore(tokens[:length])
    assert (restored.length if restored else 0) == expected


def test_an_unfinished_block_is_not_kept() -> None:
    """Only whole blocks have an address."""
    cache = remembering(prompt(2 * BLOCK - 1, 1), prompt(3, 2), [])
    assert cache.blocks == 1


def test_equal_blocks_after_different_prefixes_are_different_blocks() -> None:
    """State depends on everything before it, so the address does too."""
    tail = prompt(BLOCK, 9)
    one, other = prompt(BLOCK, 1) + tail, prompt(BLOCK, 2) + tail
    cache = remembering(one, other)
    assert cache.blocks == 4
    assert known(cache, tail) == 0
    for tokens in (one, other):
        restored = restored_from(cache, [*tokens, 0])
        assert_same(restored.caches, state_of(tokens), 2 * BLOCK)


def test_a_prompt_that_is_stored_as_it_grows_is_held_once() -> None:
    """Storing after every chunk keeps the same blocks as storing at the end."""
    tokens = prompt(4 * BLOCK, 1)
    growing = remembering(tokens[: BLOCK + 3], tokens[: 3 * BLOCK], tokens)
    assert growing.blocks == 4
    restored = restored_from(growing, [*tokens, 0])
    assert_same(restored.caches, state_of(tokens), 4 * BLOCK)


def test_the_row_of_a_padded_batch_is_stored() -> None:
    """Other rows and the columns behind the row's tokens are left out."""
    model = loaded(full())
    assert model.layout is not None
    short, long = prompt(2 * BLOCK, 1), prompt(3 * BLOCK, 2)
    caches = prefilled(model.model, long, [*short, *[0] * BLOCK])
    cache = PrefixCache(model.layout, ROOMY)
    cache.store(short, caches, 1)
    assert cache.blocks == 2
    restored = restored_from(cache, [*short, 0])
    expected = batched([caches])
    for layer in expected:
        keys, values, _length = layer.state
        layer.state = (keys[1:], values[1:], 2 * BLOCK)
    assert_same(restored.caches, expected, 2 * BLOCK)


@pytest.mark.parametrize("blocks", [1, 3])
def test_extending_a_restored_state_leaves_the_blocks_unchanged(blocks: int) -> None:
    """What a row appends, even over tokens it trimmed, never reaches what others restore."""
    tokens = prompt(blocks * BLOCK, 1)
    cache = remembering(tokens)
    for trimmed in (0, 5):
        restored = restored_from(cache, [*tokens, 0])
        for layer, spec in zip(restored.caches, LAYOUT, strict=True):
            layer.trim(trimmed)
            for count in (2, 1, 300):
                layer.update_and_fetch(
                    mx.full((1, spec.heads, count, spec.key_dim), 7.0, spec.dtype),
                    mx.full((1, spec.heads, count, spec.value_dim), 7.0, spec.dtype),
                )
            keys, values, _length = layer.state
            mx.eval(keys, values)
            assert keys[0, 0, len(tokens) - trimmed, 0] == 7.0
    again = restored_from(cache, [*tokens, 0])
    assert_same(again.caches, state_of(tokens), len(tokens))


def test_a_restored_state_outlives_its_blocks() -> None:
    """A row that was restored and has not run yet does not notice an eviction."""
    tokens = prompt(2 * BLOCK, 1)
    cache = remembering(tokens, blocks=2)
    restored = restored_from(cache, [*tokens, 0])
    cache.store(prompt(2 * BLOCK, 2), state_of(prompt(2 * BLOCK, 2)), 0)
    assert known(cache, tokens) == 0
    assert_same(restored.caches, state_of(tokens), 2 * BLOCK)


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    """A prompt that was used again stays, one that was only stored later goes."""
    hot, cold, new = (prompt(2 * BLOCK, seed) for seed in (1, 2, 3))
    cache = remembering(hot, cold, blocks=4)
    assert known(cache, hot) == len(hot)
    cache.store(new, state_of(new), 0)
    assert [known(cache, tokens) for tokens in (hot, cold, new)] == [len(hot), 0, len(new)]


def test_storing_what_is_known_counts_as_a_use() -> None:
    """A prompt that keeps being computed keeps its place."""
    hot, cold, new = (prompt(2 * BLOCK, seed) for seed in (1, 2, 3))
    cache = remembering(hot, cold, hot, new, blocks=4)
    assert [known(cache, tokens) for tokens in (hot, cold, new)] == [len(hot), 0, len(new)]


def test_leaves_are_evicted_before_the_blocks_they_continue() -> None:
    """A prompt is forgotten from its end, so what is left of it can be restored."""
    old, new = prompt(4 * BLOCK, 1), prompt(BLOCK, 2)
    cache = remembering(old, new, blocks=4)
    assert known(cache, old) == 3 * BLOCK


def test_a_shared_prefix_outlives_the_tails_that_continue_it() -> None:
    """Every use of a conversation is a use of the system prompt at its head."""
    shared = prompt(2 * BLOCK, 1)
    cache = remembering(*(shared + prompt(BLOCK, seed) for seed in range(10, 30)), blocks=4)
    assert known(cache, shared + prompt(BLOCK, 99)) == len(shared)
    held = [known(cache, shared + prompt(BLOCK, seed)) for seed in range(10, 30)]
    assert held == [2 * BLOCK] * 18 + [3 * BLOCK] * 2


def test_bytes_stay_bounded_under_many_different_prompts() -> None:
    """200 prompts of different lengths never hold more than the limit at any time."""
    limit = 20 * BLOCK_BYTES + BLOCK_BYTES // 2
    cache = PrefixCache(LAYOUT, limit)
    for seed in range(200):
        tokens = prompt(1 + seed % (6 * BLOCK), seed)
        cache.store(tokens, state_of(tokens), 0)
        assert cache.nbytes <= limit
    assert cache.blocks == 20


def test_a_prompt_larger_than_the_cache_keeps_its_beginning() -> None:
    """The blocks that fit are those that can be restored."""
    tokens = prompt(10 * BLOCK, 1)
    cache = remembering(prompt(BLOCK, 2), tokens, blocks=3)
    assert cache.blocks == 3
    assert known(cache, tokens) == 3 * BLOCK


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    """Too small a limit leaves the cache empty."""
    cache = PrefixCache(LAYOUT, BLOCK_BYTES - 1)
    cache.store(prompt(BLOCK, 1), state_of(prompt(BLOCK, 1)), 0)
    assert (cache.blocks, cache.nbytes) == (0, 0)


def test_blocks_own_their_memory() -> None:
    """Keeping the head of a prompt does not keep the arrays of the whole batch alive."""
    spec = FullSpec(2, 64, 64, mx.float32)
    cache = PrefixCache([spec], 2 * spec.row_bytes(BLOCK))
    gc.collect()
    before = mx.get_active_memory()
    state = KVCache()
    shape = (4, 2, 64 * BLOCK, 64)
    state.state = (mx.random.normal(shape), mx.random.normal(shape), 64 * BLOCK)
    cache.store(prompt(64 * BLOCK, 1), [state], 1)
    mx.synchronize()
    del state
    gc.collect()
    assert cache.nbytes == 2 * spec.row_bytes(BLOCK)
    assert mx.get_active_memory() - before < 2 * cache.nbytes


def test_clear_empties_the_cache() -> None:
    """Nothing is left to restore, and it can be filled again."""
    tokens = prompt(2 * BLOCK, 1)
    cache = remembering(tokens)
    cache.clear()
    assert (cache.blocks, cache.nbytes, known(cache, tokens)) == (0, 0, 0)
    cache.store(tokens, state_of(tokens), 0)
    assert known(cache, tokens) == len(tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12), st.integers(0, 8))
def test_whatever_is_restored_was_computed_for_exactly_these_tokens(
    prompts: list[list[int]], blocks: int
) -> None:
    """Under any order of prompts that branch and any limit."""
    cache = PrefixCache(LAYOUT, blocks * BLOCK_BYTES)
    for choices in prompts:
        tokens = [choice for choice in choices for _ in range(BLOCK)]
        restored = cache.restore([*tokens, 0])
        if restored is not None:
            assert_same(restored.caches, state_of(tokens), restored.length)
        if tokens:
            cache.store(tokens, state_of(tokens), 0)
        assert cache.blocks <= blocks
        assert known(cache, tokens) == BLOCK * min(len(choices), blocks)


def test_batched_rows_prefill_like_alone() -> None:
    """Rows of equal length, restored or computed, go on together as each does alone."""
    model = loaded(full())
    heads = [prompt(2 * BLOCK, seed) for seed in (1, 2, 3)]
    tails = [prompt(7, seed) for seed in (4, 5, 6)]
    restored = [restored_from(computed(model, head), [*head, 0]).caches for head in heads[:2]]
    together = batched([*restored, prefilled(model.model, heads[2])])
    model.model(mx.array(tails), cache=together)
    for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        alone = prefilled(model.model, head + tail)
        for layer, expected in zip(together, alone, strict=True):
            assert layer.offset == len(head + tail)
            for got, want in zip(layer.keys_and_values(), expected.keys_and_values(), strict=True):
                assert mx.allclose(got[row : row + 1], want, rtol=1e-4, atol=1e-4)


def test_rows_without_any_state_are_batched_as_fresh_caches() -> None:
    """Zero tokens are a number of tokens like any other."""
    joined = batched([[KVCache(), KVCache()], [KVCache(), KVCache()]])
    assert [cache.empty() for cache in joined] == [True, True]


def test_states_of_different_lengths_cannot_be_batched() -> None:
    """One batch has one offset."""
    with pytest.raises(ValueError, match="16, 32"):
        batched([state_of(prompt(16, 1)), state_of(prompt(32, 2))])
