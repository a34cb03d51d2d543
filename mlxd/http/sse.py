"""Server-sent events: when headers go out, keepalives, and how a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog
from aiohttp import web

from mlxd.errors import MlxdError
from mlxd.http.buffered import Buffered
from mlxd.http.context import RECORD
from mlxd.http.envelope import domain_error
from mlxd.http.events import Admitted, Done, Ended, Event, Said

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}
KEEPALIVE = b": keepalive\n\n"
# After the ceiling the end of a stream is still worth this much of trying.
LAST_WORDS_SECONDS = 1.0

log = structlog.get_logger("mlxd.request")


class StreamEncoder(Protocol):
    """One request's stream in one protocol. Frames are whole server-sent events."""

    def said(self, said: Said) -> Iterable[bytes]:
        """Frames of something new; the first also say what opens the stream."""

    def ended(self, ended: Ended) -> Iterable[bytes]:
        """Frames of the end of one answer."""

    def done(self, done: Done) -> Iterable[bytes]:
        """Frames of the end, whatever closes the stream included."""

    def error(self, error: MlxdError) -> Iterable[bytes]:
        """Frames of a failure, whatever closes the stream included."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the event loop's clock."""

    keepalive: float | None  # of silence before a comment; None = never
    deadline: float  # moment after which a reader that does not read is cut off


def frame(data: bytes) -> bytes:
    """One event without a name. JSON has no raw line breaks, so one line holds it."""
    return b"data: " + data + b"\n\n"


def named_frame(name: str, data: bytes) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + frame(data)


async def stream(
    request: web.Request,
    events: Buffered[Event],
    encoder: StreamEncoder,
    headers: Mapping[str, str],
    timing: Timing,
) -> web.StreamResponse:
    """Answer with the events that follow `Admitted`.

    Headers go out with the first event or the first keepalive due.

    Raises:
        Exception: what the source raised, while it can still become a status.
        ConnectionError: the client is gone, or does not read.
    """
    out = _Writer(request, headers, timing.deadline)
    try:
        while (event := await _next(events, out, timing.keepalive)) is not None:
            await out.write(_frames(encoder, event))
    except ConnectionError:
        raise
    except Exception as error:
        if not out.is_open:
            raise
        told = domain_error(error)
        if told is not error:
            log.exception("unexpected error", path=request.path)
        request[RECORD].facts["error"] = told.code
        await out.write(encoder.error(told))
    return await out.close()


async def _next(events: Buffered[Event], out: _Writer, keepalive: float | None) -> Event | None:
    while True:
        try:
            return await events.next(keepalive)
        except TimeoutError:
            await out.write([KEEPALIVE])


def _frames(encoder: StreamEncoder, event: Event) -> Iterable[bytes]:
    match event:
        case Admitted():
            return ()
        case Said():
            return encoder.said(event)
        case Ended():
            return encoder.ended(event)
        case Done():
            return encoder.done(event)


class _Writer:
    """The response, opened by the first write, and the ceiling on every write."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], deadline: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._deadline = deadline

    @property
    def is_open(self) -> bool:
        """Whether headers went out."""
        return self._response.prepared

    async def write(self, frames: Iterable[bytes]) -> None:
        data = b"".join(frames)
        if not data:
            return
        async with self._ceiling():
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        async with self._ceiling():
            await self._response.write_eof()
        return self._response

    @asynccontextmanager
    async def _ceiling(self) -> AsyncIterator[None]:
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(left, LAST_WORDS_SECONDS)):
                yield
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise ConnectionAbortedError("the client does not read") from None
