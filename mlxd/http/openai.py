"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mlxd.http.body import json_response, read_object
from mlxd.http.context import CONTEXT, RECORD, Context
from mlxd.http.encode import Head
from mlxd.http.encode_chat import ChatStream, chat_body
from mlxd.http.encode_completion import CompletionStream, completion_body
from mlxd.http.events import Admitted, Delta, Done, Event
from mlxd.http.generate import generate
from mlxd.http.requests import TextRequest
from mlxd.http.schema import parse_chat, parse_completion
from mlxd.http.sse import StreamEncoder, Timing, buffered, stream


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint reads its requests and writes its answers."""

    id_prefix: str
    parse: Callable[[Mapping[str, Any]], TextRequest]
    body: Callable[[Head, Delta, Done], dict[str, Any]]
    stream: Callable[[Head, bool], StreamEncoder]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request for text, streamed or not."""
        context, record = request.app[CONTEXT], request[RECORD]
        server = context.server()
        asked = self.parse(await read_object(request, limit=server.max_body))
        record.facts["stream"] = asked.stream
        events = generate(asked, context.directory, record)
        if not asked.stream:
            return await self._whole(events)
        async with buffered(events) as buffer:
            admitted = _admitted(await buffer.next(None))
            encoder = self.stream(self._head(admitted), asked.include_usage)
            timing = Timing(server.sse_keepalive, record.started + server.request_timeout)
            return await stream(request, buffer, encoder, _lane_headers(admitted), timing)

    async def _whole(self, source: AsyncGenerator[Event, None]) -> web.Response:
        deltas: list[Delta] = []
        async with aclosing(source) as events:
            admitted = _admitted(await anext(events))
            async for event in events:
                match event:
                    case Delta():
                        deltas.append(event)
                    case Done():
                        body = self.body(self._head(admitted), Delta.joined(deltas), event)
                        return json_response(body, headers=_lane_headers(admitted))
        raise RuntimeError("a generation ended without an end")

    def _head(self, admitted: Admitted) -> Head:
        return Head(f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time()), admitted.model)


def _admitted(first: Event | None) -> Admitted:
    if not isinstance(first, Admitted):
        raise TypeError(f"a generation began with {first}")
    return first


def _lane_headers(admitted: Admitted) -> dict[str, str]:
    return {"x-mlxd-lane": admitted.lane.value, "x-mlxd-lane-reason": admitted.reason}


CHAT = Endpoint("chatcmpl-", parse_chat, chat_body, ChatStream)
COMPLETIONS = Endpoint("cmpl-", parse_completion, completion_body, CompletionStream)


async def models(request: web.Request) -> web.Response:
    """Every model of the configuration."""
    context = request.app[CONTEXT]
    data = [_model(context, name) for name in context.directory.model_ids()]
    return json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    """One model, by its id or an alias."""
    return json_response(_model(request.app[CONTEXT], request.match_info["model"]))


def _model(context: Context, name: str) -> dict[str, Any]:
    """A model as OpenAI describes one."""
    found = context.directory.identify(name)
    return {"id": found.id, "object": "model", "created": found.created, "owned_by": "mlxd"}


ROUTES = (
    web.post("/v1/chat/completions", CHAT.handle),
    web.post("/v1/completions", COMPLETIONS.handle),
    web.get("/v1/models", models),
    web.get("/v1/models/{model:.+}", model),  # an alias may hold slashes
)
