"""One request for text over HTTP, whichever protocol it came by."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mlxd.http.answers import Collector, best
from mlxd.http.body import json_response, read_object
from mlxd.http.buffered import buffered
from mlxd.http.context import CONTEXT, RECORD
from mlxd.http.encode import Head, Shape
from mlxd.http.events import Admitted, Done, Ended, Event, Said
from mlxd.http.generate import generate
from mlxd.http.requests import TextRequest
from mlxd.http.sse import Timing, stream


@dataclass(frozen=True, slots=True)
class Exchange:
    """A parsed request, and how its answers are to be written."""

    request: TextRequest
    shape: Shape


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route that answers with text.

    Args:
        id_prefix: of its answers' ids.
        parse: a JSON body to an exchange; raises BadRequest.
    """

    id_prefix: str
    parse: Callable[[Mapping[str, Any]], Exchange]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, streamed or not."""
        limit = request.app[CONTEXT].server().max_body
        exchange = self.parse(await read_object(request, limit=limit))
        return await answer(request, exchange, self.id_prefix)


async def answer(request: web.Request, exchange: Exchange, id_prefix: str) -> web.StreamResponse:
    """Generate, and write the answers as the exchange says."""
    context, record = request.app[CONTEXT], request[RECORD]
    server = context.server()
    record.facts["stream"] = exchange.request.stream
    events = generate(exchange.request, context.directory, record)
    if not exchange.request.stream:
        return await _whole(events, exchange, id_prefix)
    async with buffered(events) as buffer:
        admitted = _admitted(await buffer.next(None))
        encoder = exchange.shape.stream(_head(id_prefix, admitted))
        timing = Timing(server.sse_keepalive, record.started + server.request_timeout)
        return await stream(request, buffer, encoder, _lane_headers(admitted), timing)


async def _whole(
    source: AsyncGenerator[Event, None], exchange: Exchange, id_prefix: str
) -> web.Response:
    collector = Collector()
    async with aclosing(source) as events:
        admitted = _admitted(await anext(events))
        async for event in events:
            match event:
                case Said():
                    collector.said(event)
                case Ended():
                    collector.ended(event)
                case Done():
                    head, answers = _head(id_prefix, admitted), collector.answers()
                    if (rule := exchange.request.best_of) is not None:
                        answers = best(answers, exchange.request.answers, rule)
                    body = exchange.shape.whole(head, answers, event.usage)
                    return json_response(body, headers=_lane_headers(admitted))
    raise RuntimeError("a generation ended without an end")


def _head(id_prefix: str, admitted: Admitted) -> Head:
    return Head(
        f"{id_prefix}{uuid.uuid4().hex}", int(time.time()), admitted.model, admitted.prompt_tokens
    )


def _admitted(first: Event | None) -> Admitted:
    if not isinstance(first, Admitted):
        raise TypeError(f"a generation began with {first}")
    return first


def _lane_headers(admitted: Admitted) -> dict[str, str]:
    return {"x-mlxd-lane": admitted.lane.value, "x-mlxd-lane-reason": admitted.reason}
