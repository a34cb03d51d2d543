"""Sources of events that run to their end whether or not anybody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Buffered(Generic[T]):
    """Runs each source in a task of its own and keeps what comes, in that order.

    A reader that never reads so holds up nothing but its own events, of which
    there are no more than its token limit.
    """

    def __init__(self, sources: int) -> None:
        self._items: asyncio.Queue[T | Exception | None] = asyncio.Queue()
        self._open = sources

    async def pump(self, source: AsyncGenerator[T, None]) -> None:
        """Take everything from the source, its failure too."""
        try:
            async with aclosing(source):
                async for item in source:
                    self._items.put_nowait(item)
        except Exception as error:  # noqa: BLE001 - raised again where it is read
            self._items.put_nowait(error)
        finally:
            self._open -= 1
            if self._open == 0:
                self._items.put_nowait(None)

    async def next(self, seconds: float | None) -> T | None:
        """The next item; None at the end of all sources.

        Raises:
            TimeoutError: nothing came in that time.
            Exception: what a source raised.
        """
        async with asyncio.timeout(seconds):
            item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


@asynccontextmanager
async def buffered(*sources: AsyncGenerator[T, None]) -> AsyncIterator[Buffered[T]]:
    """Buffer sources; they are closed, wherever they are, when the context exits."""
    buffer: Buffered[T] = Buffered(len(sources))
    tasks = [asyncio.create_task(buffer.pump(source)) for source in sources]
    try:
        yield buffer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def merged(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items of all sources as they come; closing it closes them."""
    if len(sources) == 1:  # which is nearly every request: no queue between, no task
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    async with buffered(*sources) as buffer:
        while (following := await buffer.next(None)) is not None:
            yield following
