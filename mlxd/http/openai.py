"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlxd.http.body import json_response
from mlxd.http.context import CONTEXT, Context
from mlxd.http.encode_chat import ChatShape
from mlxd.http.encode_completion import CompletionShape
from mlxd.http.endpoint import Endpoint, Exchange
from mlxd.http.schema import parse_chat, parse_completion


def _chat(body: Mapping[str, Any]) -> Exchange:
    request = parse_chat(body)
    return Exchange(request, ChatShape(request.include_usage))


def _completion(body: Mapping[str, Any]) -> Exchange:
    request = parse_completion(body)
    return Exchange(request, CompletionShape(request.include_usage))


CHAT = Endpoint("chatcmpl-", _chat)
COMPLETIONS = Endpoint("cmpl-", _completion)


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
