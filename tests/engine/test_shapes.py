"""Which shapes a step has: widths, capacities, columns, and which prompts run together."""

from __future__ import annotations

import pytest

from mlxd.engine.pool import capacity_classes, columns_for, rung_for, rungs
from mlxd.engine.port import Chunk
from mlxd.engine.prefill import groups


def chunk(row: int, length: int, start: int = 0, *, last: bool = True) -> Chunk:
    """A chunk of zeros."""
    return Chunk(row, [0] * length, start, last)


def rows(grouped: list[list[Chunk]]) -> list[list[int]]:
    """Row numbers of each group."""
    return [[part.row for part in group] for group in grouped]


def test_the_width_ladder_is_powers_of_two_up_to_the_width() -> None:
    """The configured width is a rung, too."""
    assert rungs(16) == [1, 2, 4, 8, 16]
    assert rungs(6) == [1, 2, 4, 6]
    assert rungs(1) == [1]


@pytest.mark.parametrize(
    ("live", "width", "rung"), [(0, 8, 1), (1, 8, 1), (3, 8, 4), (5, 6, 6), (6, 6, 6), (11, 4, 16)]
)
def test_a_pool_is_as_wide_as_its_rows_need(live: int, width: int, rung: int) -> None:
    """Rows above a width that was made smaller keep a power of two."""
    assert rung_for(live, width) == rung


def test_the_last_capacity_class_is_the_context() -> None:
    """A row can always grow to it."""
    assert capacity_classes(8192) == [512, 2048, 8192]
    assert capacity_classes(3000) == [512, 2048, 3000]
    assert capacity_classes(100) == [100]


@pytest.mark.parametrize("length", [1, 64, 65, 130, 513, 1000, 4097])
def test_a_step_reads_all_tokens_and_at_most_an_eighth_in_vain(length: int) -> None:
    """Rounded up to few shapes."""
    columns = columns_for(length, 8192)
    assert columns >= length
    assert columns - length < max(64, length // 8 + 1)


def test_a_step_never_reads_beyond_the_capacity() -> None:
    """Also where rounding would."""
    assert columns_for(99, 100) == 100


def test_whole_prompts_of_similar_length_run_together() -> None:
    """A much shorter one would be mostly padding."""
    chunks = [chunk(1, 90), chunk(2, 100), chunk(3, 20)]
    assert rows(groups(chunks, 512, continued=True)) == [
        [2, 1],
        [3],
    ]


def test_prompts_beyond_the_smallest_window_are_not_padded() -> None:
    """Padding would rotate real tokens out of a ring; equal ones need none."""
    chunks = [chunk(1, 20), chunk(2, 20), chunk(3, 16)]
    assert rows(groups(chunks, 16, continued=True)) == [
        [1, 2],
        [3],
    ]


def test_only_last_chunks_from_the_same_start_run_together() -> None:
    """The others' states have another length, or go on alone."""
    chunks = [chunk(1, 64, last=False), chunk(2, 64, last=False), chunk(3, 50, 32), chunk(4, 50)]
    assert rows(groups(chunks, 512, continued=True)) == [[1], [2], [4], [3]]


def test_rows_that_have_state_run_alone_where_states_cannot_be_put_together() -> None:
    """A ring or a recurrent state of several rows is only made from the start."""
    chunks = [chunk(1, 40, 64), chunk(2, 40, 64), chunk(3, 30), chunk(4, 30)]
    assert rows(groups(chunks, 512, continued=False)) == [[3, 4], [1], [2]]


def test_recurrent_layers_take_prompts_of_equal_length_together() -> None:
    """Padding would be taken up into their state."""
    chunks = [chunk(1, 40), chunk(2, 39), chunk(3, 40)]
    assert rows(groups(chunks, 0, continued=False)) == [[1, 3], [2]]
