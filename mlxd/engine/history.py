"""The last tokens of a pool's rows, on the device: what penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxd.engine.sampling.ragged import rung_of

#: Shortest history of a pool in which a row has penalties.
_SMALLEST = 32


class History:
    """Each slot's last tokens, newest last; empty while no row needs any.

    It lives on the device, so that a step enqueued ahead sees the token before it.
    What stands before a row's first token, or in a slot whose row has no use for
    it, is some token or other. The pool owns it.
    """

    def __init__(self, rung: int) -> None:
        #: uint32 [slots, width].
        self.tokens = mx.zeros((rung, 0), mx.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.tokens.nbytes

    def fit(self, window: int) -> None:
        """Take the width that rows with at most this window need; oldest tokens go first."""
        width = rung_of(window, _SMALLEST) if window else 0
        missing = width - self.tokens.shape[1]
        if missing > 0:
            self.tokens = mx.pad(self.tokens, [(0, 0), (missing, 0)])
        elif missing < 0:
            self.tokens = self.tokens[:, -missing:]

    def join(self, slot: int, recent: Sequence[int]) -> None:
        """A row sits down whose last tokens, as many as its window, are these."""
        if recent:
            self.fit(max(len(recent), self.tokens.shape[1]))
            row = mx.array(np.array(recent, dtype=np.uint32))
            self._write(slot, mx.pad(row, (self.tokens.shape[1] - len(recent), 0)))

    def move(self, slot: int, source: History, source_slot: int) -> None:
        """Copy a row's from another pool, or from another slot."""
        width = source.tokens.shape[1]
        if width:
            self.fit(max(width, self.tokens.shape[1]))
            row = source.tokens[source_slot]
            self._write(slot, mx.pad(row, (self.tokens.shape[1] - width, 0)))

    def push(self, tokens: mx.array) -> None:
        """Every slot got one more token, [slots]."""
        if self.tokens.shape[1]:
            self.tokens = mx.concatenate([self.tokens[:, 1:], tokens[:, None]], axis=1)

    def resize(self, rung: int) -> None:
        """Keep the first min(old, new) slots."""
        missing = max(0, rung - self.tokens.shape[0])
        self.tokens = mx.pad(self.tokens[:rung], [(0, missing), (0, 0)])

    def _write(self, slot: int, row: mx.array) -> None:
        """A new array: the old one may be part of a step that is on its way."""
        here = mx.arange(self.tokens.shape[0])[:, None] == slot
        self.tokens = mx.where(here, row[None], self.tokens)
