"""OpenAI's newer route: responses, which may go on from each other."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from mlxd.http.body import json_response, read_object
from mlxd.http.context import CONTEXT, RECORD
from mlxd.http.encode_responses import ResponsesShape
from mlxd.http.endpoint import Exchange, answer
from mlxd.http.responses_input import as_message
from mlxd.http.responses_schema import ResponsesRequest, read_responses, responses_request
from mlxd.http.responses_store import ResponseStore, Stored

STORE: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)


async def create(request: web.Request) -> web.StreamResponse:
    """A response, streamed or not."""
    limit = request.app[CONTEXT].server().max_body
    body = read_responses(await read_object(request, limit=limit))
    store, owner = request.app[STORE], request[RECORD].caller.name
    before: tuple[dict[str, Any], ...] = ()
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id, owner, "previous_response_id")
        before = previous.conversation
    asked = responses_request(body, before)
    shape = ResponsesShape(body, partial(_keep, store, owner, asked))
    return await answer(request, Exchange(asked.request, shape), "resp_")


async def retrieve(request: web.Request) -> web.Response:
    """A response that is still kept."""
    owner = request[RECORD].caller.name
    return json_response(request.app[STORE].get(request.match_info["response"], owner).body)


async def delete(request: web.Request) -> web.Response:
    """Forget one."""
    response = request.match_info["response"]
    request.app[STORE].delete(response, request[RECORD].caller.name)
    return json_response({"id": response, "object": "response", "deleted": True})


def _keep(
    store: ResponseStore, owner: str | None, asked: ResponsesRequest, body: dict[str, Any]
) -> None:
    if asked.body.store:
        conversation = (*asked.conversation, *as_message(body["output"]))
        store.put(Stored(owner, body, conversation))


ROUTES = (
    web.post("/v1/responses", create),
    web.get("/v1/responses/{response}", retrieve),
    web.delete("/v1/responses/{response}", delete),
)
