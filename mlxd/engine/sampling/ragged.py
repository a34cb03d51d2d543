"""Lists of different lengths as one array, in few shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def rung_of(length: int, smallest: int) -> int:
    """The shortest length on the ladder of powers of two that holds `length` entries."""
    return max(smallest, 1 << max(length - 1, 0).bit_length())


def ragged(lists: Sequence[Sequence[Any]], fill: np.generic, *, smallest: int) -> np.ndarray:
    """The lists as rows of an array of `fill`'s dtype, as long as a rung that holds all."""
    width = rung_of(max(map(len, lists), default=0), smallest)
    table = np.full((len(lists), width), fill)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    return table
