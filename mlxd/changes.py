"""What operators change: one thing at a time, and each to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Changes:
    """Runs each change in a task of its own: an operator's client that goes away ends none."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether one is being made."""
        return self._turn.locked()

    async def make(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Wait for the change's turn, make it, and return or raise what it does.

        Cancelled, it goes on, and what it raises is told in the log.
        """
        task = asyncio.create_task(self._in_turn(change), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            log.info("nobody waits for this change any more; it goes on", change=name)
            task.add_done_callback(partial(_tell, name))
            raise

    async def ended(self) -> None:
        """Wait until nothing is being changed, and nothing waits for its turn."""
        if self._tasks:
            await asyncio.wait([*self._tasks])

    async def _in_turn(self, change: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            return await change()


def _tell(name: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the change failed", change=name, reason=str(error))
