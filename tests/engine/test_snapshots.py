"""Prompts of models whose state cannot be cut go on from where an earlier one was remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxd.engine.prefill import arrays_of
from mlxd.engine.snapshots import SPACING, Snapshots
from tests.engine.architectures import build
from tests.engine.tiny import WINDOW, Engine, loaded, mixed_gemma3, prompt, sliding, solo

ROOMY = 1 << 26
CHUNK = 64
#: Windows, states, lists of caches, and all of them beside full attention.
NAMES = [
    "deepseek_v32",
    "falcon_h1",
    "gemma3_text",
    "gpt_oss",
    "jamba",
    "lfm2",
    "mamba2",
    "qwen3_next",
    "rwkv7",
]


def made() -> list[Any]:
    """Empty caches of a model of three layers."""
    return [KVCache(), ArraysCache(2), RotatingKVCache(4)]


def state_of(tokens: Sequence[int], rows: int = 1, row: int = 0) -> list[Any]:
    """Made-up state that depends on all tokens, in one row of a batch; the others hold zeros."""
    caches = made()
    sums = mx.cumsum(mx.array(list(tokens), mx.float32)) % 1009
    full = mx.zeros((rows, 1, len(tokens), 2))
    full[row, 0] = mx.stack([sums, -sums], axis=1)
    caches[0].state = (full, full + 1, len(tokens))
    total = mx.zeros((rows, 3))
    total[row] = sums[-1]
    caches[1][1] = total  # the other stays None
    window = full[:, :, -4:]
    caches[2].state = (window, window, len(tokens), 0, 4, window.shape[2])
    return caches


def remembering(*prompts: Sequence[int], max_bytes: int = ROOMY) -> Snapshots:
    """Snapshots of these prompts' ends."""
    snapshots = Snapshots(made, max_bytes)
    for tokens in prompts:
        snapshots.store(tokens, state_of(tokens), 0)
    return snapshots


def known(snapshots: Snapshots, tokens: Sequence[int]) -> int:
    """How many of these tokens can be restored; the state must be what computing would give."""
    restored = snapshots.restore([*tokens, 0])
    if restored is None:
        return 0
    expected = state_of(tokens[: restored.length])
    for cache, other in zip(restored.caches, expected, strict=True):
        assert type(cache) is type(other)
        for found, right in zip(arrays_of([cache]), arrays_of([other]), strict=True):
            assert mx.array_equal(found, right)
    assert restored.caches[0].offset == restored.caches[2].offset == restored.length
    return restored.length


def test_an_empty_one_restores_nothing() -> None:
    """Nor does one that saw another prompt."""
    assert known(remembering(), [1, 2, 3]) == 0
    assert known(remembering([1, 2, 4]), [1, 2, 3]) == 0


def test_a_prompt_goes_on_from_the_furthest_snapshot_inside_it() -> None:
    """Of several that fit, along whichever of them lead furthest."""
    snapshots = remembering([1, 2], [1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7])
    assert known(snapshots, [1, 2, 9]) == 2
    assert known(snapshots, [1, 2, 3, 4, 9]) == 3
    assert known(snapshots, [1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_an_exact_hit_leaves_the_last_token() -> None:
    """A decode step has to compute it, so the state must be known without it."""
    snapshots = remembering([1, 2, 3], [1, 2, 3, 4])
    restored = snapshots.restore([1, 2, 3, 4])
    assert restored is not None
    assert restored.length == 3


def test_columns_of_a_common_prefix_are_held_once() -> None:
    """What cannot be cut is held by every snapshot."""
    one = remembering(range(100)).nbytes
    columns = 2 * 100 * 2 * 4
    both = remembering(range(100), [*range(100), 7, 8]).nbytes
    assert both == one + (one - columns) + 2 * 2 * 2 * 4


def test_a_prompt_in_progress_leaves_snapshots_far_enough_apart() -> None:
    """The further in, the wider: some 20 for 30,000 tokens."""
    snapshots = Snapshots(made, ROOMY)
    tokens = list(range(SPACING * 9))
    for end in range(64, len(tokens), 64):
        snapshots.passing(tokens[:end], state_of(tokens[:end]), 0)
    kept = [end for end in range(64, len(tokens), 64) if known(snapshots, tokens[:end]) == end]
    assert kept == [256, 512, 768, 1024, 1280, 1600, 2048]


def test_the_row_of_a_batch_is_kept_but_not_a_padded_one() -> None:
    """Padding is in a state for good."""
    snapshots = Snapshots(made, ROOMY)
    tokens = [5, 6, 7, 8]
    caches = state_of(tokens, rows=3, row=1)
    snapshots.store(tokens[:3], caches, 1)
    assert snapshots.snapshots == 0
    snapshots.store(tokens, caches, 1)
    assert known(snapshots, tokens) == 4


def test_a_snapshot_is_not_changed_by_who_goes_on_from_it() -> None:
    """In place, as mlx-lm's caches do."""
    snapshots = remembering([1, 2, 3])
    restored = snapshots.restore([1, 2, 3, 4])
    assert restored is not None
    for step in range(6):
        for cache in (restored.caches[0], restored.caches[2]):
            cache.update_and_fetch(mx.full((1, 1, 1, 2), 90.0 + step), mx.ones((1, 1, 1, 2)))
        restored.caches[1][1][:] = 5
        mx.eval(arrays_of(restored.caches))
    assert known(snapshots, [1, 2, 3]) == 3


def test_the_least_recently_used_goes_first_and_never_one_that_others_need() -> None:
    """A use counts for all before it."""
    one = remembering([1]).nbytes
    room = remembering([1], [1, 2], [8], [9]).nbytes
    snapshots = remembering([1], [1, 2], [7], max_bytes=room)
    assert known(snapshots, [1, 2]) == 2
    snapshots.store([8], state_of([8]), 0)
    snapshots.store([9], state_of([9]), 0)  # [7] is older than [1, 2]
    assert [known(snapshots, tokens) for tokens in ([7], [1, 2], [8], [9])] == [0, 2, 1, 1]
    snapshots.resize(one)
    assert snapshots.snapshots == 1
    snapshots.clear()
    assert (snapshots.nbytes, snapshots.snapshots) == (0, 0)
    assert known(snapshots, [9]) == 0


def test_one_that_does_not_fit_in_beside_its_own_beginning_is_not_kept() -> None:
    """And evicts no beginning."""
    one = remembering([1]).nbytes
    snapshots = remembering([1], [1, 2], max_bytes=one)
    assert known(snapshots, [1, 2]) == 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=25),
    st.integers(0, 1500),
)
def test_whatever_is_restored_was_computed_for_exactly_these_tokens(
    prompts: list[list[int]], max_bytes: int
) -> None:
    """Within its bytes, after any history."""
    snapshots = Snapshots(made, max_bytes)
    for tokens in prompts:
        known(snapshots, tokens)
        snapshots.store(tokens, state_of(tokens), 0)
        assert 0 <= snapshots.nbytes <= max_bytes
        assert known(snapshots, tokens) <= len(tokens)
    while snapshots.snapshots:
        snapshots.resize(snapshots.nbytes - 1)
    assert snapshots.nbytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_turns_and_shared_beginnings_equal_solo_generation(name: str) -> None:
    """Far beyond the window; a conversation's next turn, a repetition, and another question."""
    model = loaded(build(name))
    engine = Engine(model, chunk=CHUNK, prefix_cache=ROOMY)
    first = prompt(SPACING + 3 * CHUNK, 1)
    turn = [*first, *prompt(30, 2)]
    question = [*first[: SPACING + 10], *prompt(50, 3)]
    expected = {0: 0, 1: len(first) - 1, 2: len(turn) - 1, 3: SPACING}
    for number, tokens in enumerate([first, turn, turn, question]):
        engine.submit(number, tokens, 12)
        engine.run()
        assert engine.finished[number].error is None
        assert engine.finished[number].cached_tokens == expected[number], number
        assert engine.tokens[number] == solo(model.model, tokens, 12), number


@pytest.mark.parametrize("make", [sliding, mixed_gemma3], ids=lambda make: make.__name__)
def test_rows_that_run_together_share_what_the_first_one_computed(make) -> None:
    """While others join and leave."""
    model = loaded(make())
    engine = Engine(model, chunk=CHUNK, prefix_cache=ROOMY, width=4)
    shared = prompt(SPACING + 2 * WINDOW, 1)
    prompts = [[*shared, *prompt(5 + number, number)] for number in range(6)]
    engine.submit(0, prompts[0], 40)
    for _ in range(12):
        engine.step()
    for number in range(1, 6):
        engine.submit(number, prompts[number], 10 + number)
    engine.run()
    for number in range(1, 6):
        assert engine.finished[number].cached_tokens == SPACING
        assert engine.tokens[number] == solo(model.model, prompts[number], 10 + number)


def test_memory_that_a_snapshot_takes_is_its_own() -> None:
    """Not a view of the batch that it was cut from."""
    tokens = list(range(64))
    snapshots = Snapshots(made, ROOMY)
    caches = state_of(tokens, rows=64)
    mx.eval(arrays_of(caches))
    snapshots.store(tokens, caches, 0)
    mx.synchronize()
    held = mx.get_active_memory()
    size = sum(array.nbytes for array in arrays_of(caches[:1]))
    del caches
    assert mx.get_active_memory() <= held - size
