"""A model's tokens, without generating any: `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from aiohttp import web
from pydantic import Field, model_validator

from mlxd.errors import BadRequest
from mlxd.http.body import json_response, read_object
from mlxd.http.context import CONTEXT
from mlxd.http.described import ChatMessages, ChatTools
from mlxd.http.messages import parse_messages
from mlxd.http.parts import Part, validate
from mlxd.http.prepare import check_length, check_tokens, prompt_tokens
from mlxd.http.requests import ChatPrompt, TextPrompt
from mlxd.http.schema import check_template_kwargs
from mlxd.http.tools import parse_chat_tools
from mlxd.serving import Served

MAX_TOKENS = 2**20


class TokenizeBody(Part):
    """`POST /tokenize`: a text, or a conversation."""

    model: str
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool = True  # to a text; templates write their own
    return_token_strs: bool = False
    tools: ChatTools = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("expected either prompt or messages", param="prompt")
        check_template_kwargs(self.chat_template_kwargs)
        return self


class DetokenizeBody(Part):
    """`POST /detokenize`."""

    model: str
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS)]


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text or of a conversation."""
    context = request.app[CONTEXT]
    limit = context.server().max_body
    body = validate(TokenizeBody, await read_object(request, limit=limit))
    with context.directory.using(body.model) as served:
        tokens = await _tokens(body, served)
        strings = await served.tokenizer.strings(tokens) if body.return_token_strs else None
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": served.capabilities.context,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens, special ones included."""
    context = request.app[CONTEXT]
    limit = context.server().max_body
    body = validate(DetokenizeBody, await read_object(request, limit=limit))
    with context.directory.using(body.model) as served:
        check_tokens(body.tokens, "tokens", served.capabilities)
        return json_response({"prompt": await served.tokenizer.decode(body.tokens)})


async def _tokens(body: TokenizeBody, served: Served) -> list[int]:
    if body.messages is not None:
        prompt = ChatPrompt(
            messages=parse_messages(body.messages),
            tools=parse_chat_tools(body.tools),
            template_kwargs=body.chat_template_kwargs,
        )
        return list(await prompt_tokens(prompt, served))
    text, special = body.prompt or "", body.add_special_tokens
    check_length(TextPrompt(text), served)
    return await served.tokenizer.encode(text, add_special_tokens=special)


ROUTES = (web.post("/tokenize", tokenize), web.post("/detokenize", detokenize))
