"""Anthropic's routes: messages, and the count of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlxd.http.anthropic_schema import parse_anthropic, parse_count
from mlxd.http.body import json_response, read_object
from mlxd.http.context import CONTEXT
from mlxd.http.encode_anthropic import AnthropicShape
from mlxd.http.endpoint import Endpoint, Exchange
from mlxd.http.prepare import prompt_tokens


def _messages(body: Mapping[str, Any]) -> Exchange:
    request, shown = parse_anthropic(body)
    return Exchange(request, AnthropicShape(shown))


MESSAGES = Endpoint("msg_", _messages)


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens a prompt has for its model; nothing is generated."""
    context = request.app[CONTEXT]
    model, prompt = parse_count(await read_object(request, limit=context.server().max_body))
    with context.directory.using(model) as served:
        tokens = await prompt_tokens(prompt, served)
    return json_response({"input_tokens": len(tokens)})


ROUTES = (
    web.post("/v1/messages", MESSAGES.handle),
    web.post("/v1/messages/count_tokens", count_tokens),
)
