"""`/tokenize` and `/detokenize`: a model's tokens without generating any."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import CONTEXT, MODEL, FakeGateway, directory, says, serving
from tests.text.marked import tool

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def url(marked: Tokenizer) -> AsyncIterator[str]:
    """A server whose model takes tools."""
    async with serving(directory(marked, FakeGateway(says([500])))) as url:
        yield url


async def post(http: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, Any]:
    """Status and body."""
    async with http.post(url, json={"model": MODEL} | fields) as answer:
        return answer.status, await answer.json()


async def test_a_text_goes_to_tokens_and_back(
    url: str, http: aiohttp.ClientSession, marked: Tokenizer
) -> None:
    """With the vocabulary's own writing where it is wanted."""
    status, body = await post(http, f"{url}/tokenize", prompt="Hello wörld", return_token_strs=True)
    assert status == 200
    assert body["tokens"] == await marked.encode("Hello wörld")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == CONTEXT
    assert body["token_strs"][0] == "Hello"
    _status, back = await post(http, f"{url}/detokenize", tokens=body["tokens"])
    assert back == {"prompt": "Hello wörld"}


async def test_a_conversation_goes_through_its_template(
    url: str, http: aiohttp.ClientSession, marked: Tokenizer
) -> None:
    """The tokens that a chat completion's prompt would have."""
    tools = [tool("f")]
    kwargs = {"enable_thinking": False}
    _status, body = await post(
        http, f"{url}/tokenize", messages=MESSAGES, tools=tools, chat_template_kwargs=kwargs
    )
    want = await marked.encode_chat(MESSAGES, tools=tools, chat_template_kwargs=kwargs)
    assert body["tokens"] == want
    assert body["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2_000_000_000]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_cannot_be_used_is_named(
    url: str, http: aiohttp.ClientSession, path: str, fields: dict[str, Any], param: str
) -> None:
    """400 in the envelope."""
    status, body = await post(http, url + path, **fields)
    assert (status, body["error"]["param"]) == (400, param)


async def test_a_text_that_can_never_fit_is_refused_without_being_tokenised(
    url: str, http: aiohttp.ClientSession, marked: Tokenizer
) -> None:
    """It would keep the tokenizer from everybody else."""
    body = {"model": MODEL, "prompt": "a" * (CONTEXT * marked.longest + 1)}
    data, headers = io.BytesIO(json.dumps(body).encode()), {"content-type": "application/json"}
    async with http.post(f"{url}/tokenize", data=data, headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "context_length_exceeded"
