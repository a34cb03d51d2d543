"""Counting what is held, so that something can wait until nothing is."""

from __future__ import annotations

import asyncio


class Holds:
    """A count of things held that can be waited on until it is zero."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return self._count

    def take(self) -> None:
        """One more is held."""
        self._count += 1
        self._none.clear()

    def release(self) -> None:
        """One less. Raises RuntimeError when nothing was held."""
        if self._count == 0:
            raise RuntimeError("released more holds than were taken")
        self._count -= 1
        if self._count == 0:
            self._none.set()

    async def none(self) -> None:
        """Wait until nothing is held."""
        await self._none.wait()
