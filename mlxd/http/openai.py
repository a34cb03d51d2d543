"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mlxd.errors import Draining, ModelNotReady
from mlxd.http.body import json_response, read_object
from mlxd.http.context import CONTEXT, RECORD, Context, Record
from mlxd.http.encode import Head
from mlxd.http.encode_chat import ChatStream, chat_body
from mlxd.http.encode_completion import CompletionStream, completion_body
from mlxd.http.events import Admitted, Delta, Done, Event
from mlxd.http.generate import generate, prepare
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
        call = await prepare(asked, context.directory, record.request_id)
        record.facts.update(model=call.served.id, stream=asked.stream)
        head = Head(f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time()), call.served.id)
        events = _noted(generate(call), record)
        if asked.stream:
            timing = Timing(server.sse_keepalive, record.started + server.request_timeout)
            return await _streamed(request, events, self.stream(head, asked.include_usage), timing)
        return await self._whole(head, events)

    async def _whole(self, head: Head, source: AsyncGenerator[Event, None]) -> web.Response:
        headers: dict[str, str] = {}
        deltas: list[Delta] = []
        async with aclosing(source) as events:
            async for event in events:
                match event:
                    case Admitted():
                        headers = _lane_headers(event)
                    case Delta():
                        deltas.append(event)
                    case Done():
                        return json_response(
                            self.body(head, Delta.joined(deltas), event), headers=headers
                        )
        raise RuntimeError("a generation ended without an end")


async def _streamed(
    request: web.Request,
    source: AsyncGenerator[Event, None],
    encoder: StreamEncoder,
    timing: Timing,
) -> web.StreamResponse:
    async with buffered(source) as events:
        first = await events.next(None)
        headers = _lane_headers(first) if isinstance(first, Admitted) else {}
        return await stream(request, events, encoder, headers, timing)


async def _noted(
    source: AsyncGenerator[Event, None], record: Record
) -> AsyncGenerator[Event, None]:
    """The same events, with what the log line wants to know written down."""
    async with aclosing(source) as events:
        async for event in events:
            match event:
                case Admitted():
                    record.facts.update(lane=event.lane.value, reason=event.reason)
                case Delta() if record.first_token is None:
                    record.first_token = asyncio.get_running_loop().time()
                case Done(outcome):
                    record.facts.update(
                        outcome=outcome.name,
                        prompt_tokens=outcome.prompt_tokens,
                        cached_tokens=outcome.cached_tokens,
                        completion_tokens=outcome.completion_tokens,
                    )
            yield event


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
    """A model as OpenAI describes one; until it serves, it is as old as the daemon."""
    try:
        served = context.directory.resolve(name)
    except (ModelNotReady, Draining):
        id_, created = name, context.created
    else:
        id_, created = served.id, served.created
    return {"id": id_, "object": "model", "created": created, "owned_by": "mlxd"}


ROUTES = (
    web.post("/v1/chat/completions", CHAT.handle),
    web.post("/v1/completions", COMPLETIONS.handle),
    web.get("/v1/models", models),
    web.get("/v1/models/{model}", model),
)
