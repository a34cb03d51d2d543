"""How many requests are being answered, so that a drain can wait for the last byte."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from mlxd.holds import Holds


class InFlight:
    """Counts requests from their headers to the end of their streams.

    A row may end long before its client has read everything; the daemon ends
    after both.
    """

    def __init__(self) -> None:
        self._answers = Holds()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Put this outermost."""
        self._answers.take()
        try:
            return await handler(request)
        finally:
            self._answers.release()

    async def none(self) -> None:
        """Wait until nothing is being answered."""
        await self._answers.none()
