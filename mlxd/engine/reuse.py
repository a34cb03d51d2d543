"""What prompts take from a prefix cache and leave in it, where a model can have one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlxd.engine.loading import LoadedModel
from mlxd.engine.prefill import Prefilled
from mlxd.engine.prefix import PrefixCache, Prefixes
from mlxd.engine.snapshots import Snapshots


class Reuse:
    """One engine's prefix cache, of the kind that its model's layers allow.

    A cache that fails is given up: a request must not pay for what others might need.
    """

    def __init__(self, loaded: LoadedModel, max_bytes: int) -> None:
        """Blocks where all layers have full attention, snapshots where not.

        Args:
            max_bytes: what it may hold, where rows leave so much; can be set later.
        """
        self.max_bytes = max_bytes
        self._prefixes: Prefixes | None = None
        if PrefixCache.supports(loaded.layout or []):
            self._prefixes = PrefixCache(loaded.layout or [], max_bytes)
        elif loaded.layout:
            self._prefixes = Snapshots(loaded.make_caches, max_bytes)

    @property
    def has_room(self) -> bool:
        """Whether there is a cache, with room for anything."""
        return self._prefixes is not None and self._prefixes.has_room

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return 0 if self._prefixes is None else self._prefixes.nbytes

    def fit(self, left: float) -> None:
        """Take at most what the rows leave, in bytes."""
        if self._prefixes is not None:
            self._prefixes.resize(int(min(self.max_bytes, max(0, left))))

    def clear(self) -> None:
        """Forget what it holds."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def restore(self, tokens: Sequence[int]) -> Prefilled | None:
        """State of the longest known prefix of a prompt, its last token left out, or None."""
        restored = self._prefixes.restore(tokens) if self._prefixes is not None else None
        if restored is None:
            return None
        return Prefilled(list(restored.caches), 0, restored.length)

    def passing(self, prompt: Sequence[int], state: Prefilled) -> None:
        """A prefill has got so far, and goes on."""
        if self._prefixes is not None:
            self._guarded(self._prefixes.passing, prompt, state)

    def store(self, prompt: Sequence[int], state: Prefilled) -> None:
        """A prefill is through."""
        if self._prefixes is not None:
            self._guarded(self._prefixes.store, prompt, state)

    def _guarded(
        self,
        keep: Callable[[Sequence[int], Sequence[Any], int], None],
        prompt: Sequence[int],
        state: Prefilled,
    ) -> None:
        try:
            keep(prompt[: state.length], state.caches, state.row)
        except (RuntimeError, ValueError, MemoryError) as error:
            # The row has all that it needs: its request must not pay for this.
            print(f"the prefix cache is off from now on: {error!r}", file=sys.stderr)  # noqa: T201
            self._prefixes = None
