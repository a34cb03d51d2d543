"""`/openapi.json`: the public API, described by the models that parse its requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from mlxd import __version__
from mlxd.http.anthropic_schema import CountBody, MessagesBody
from mlxd.http.body import json_response
from mlxd.http.parts import Part
from mlxd.http.responses_schema import ResponsesBody
from mlxd.http.schema import ChatBody, CompletionBody
from mlxd.http.tokens import DetokenizeBody, TokenizeBody

#: The body of each POST route, and whether its answer may be a stream.
BODIES: Mapping[str, tuple[type[Part], bool]] = {
    "/v1/chat/completions": (ChatBody, True),
    "/v1/completions": (CompletionBody, True),
    "/v1/responses": (ResponsesBody, True),
    "/v1/messages": (MessagesBody, True),
    "/v1/messages/count_tokens": (CountBody, False),
    "/tokenize": (TokenizeBody, False),
    "/detokenize": (DetokenizeBody, False),
}
#: Routes without a body, by method.
OTHERS: Mapping[str, str] = {
    "/v1/models": "get",
    "/v1/models/{model}": "get",
    "/v1/responses/{response}": "get",
    "/livez": "get",
    "/readyz": "get",
    "/health": "get",
}

_ERROR = {
    "description": "The protocol's own envelope of an error; `message` names what was wrong.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {"type": "object", "required": ["message"]}},
            }
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """The description, in OpenAPI 3.1."""
    kinds = [(kind, "validation") for kind, _streams in BODIES.values()]
    references, schemas = models_json_schema(
        kinds,  # type: ignore[arg-type]  # the mode is a Literal, which a list forgets
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {
        path: {"post": _post(kind, references[kind, "validation"], streams=streams)}
        for path, (kind, streams) in BODIES.items()
    }
    for path, method in OTHERS.items():
        paths[path] = {method: _get(path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxd", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _post(kind: type[Part], reference: Mapping[str, Any], *, streams: bool) -> dict[str, Any]:
    summary, *_ = (kind.__doc__ or "").splitlines()
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        },
        "responses": {"200": {"description": "OK", "content": content}, "default": _ERROR},
    }


def _get(path: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    return {
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}, "default": _ERROR},
    }


async def openapi(_request: web.Request) -> web.Response:
    """The description of this daemon's public API."""
    return json_response(document())


ROUTES = (web.get("/openapi.json", openapi),)
