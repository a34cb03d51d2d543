"""What a client sends never reaches the engine unchecked: it still serves afterwards."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def send(base: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """POST JSON; status and the decoded answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(base + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logit_bias": {"AI": -100}}, "logit_bias"),
        (CHAT, {"logit_bias": {"49152": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"2000000000": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-3": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": [1, 49152]}, "prompt"),
        (COMPLETIONS, {"prompt": [2000000000]}, "prompt"),
        (COMPLETIONS, {"prompt": [-3]}, "prompt"),
        (CHAT, {"max_tokens": 2049}, "max_tokens"),
        (CHAT, {"temperature": -1}, "temperature"),
    ],
)
async def test_a_bad_value_is_a_400_that_names_the_field_and_the_engine_lives(
    base: str, path: str, fields: dict[str, Any], param: str
) -> None:
    """An id outside the vocabulary would kill the engine process."""
    body = {"model": "default", "max_tokens": 2}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    status, answer = await send(base, path, {**body, **fields})
    assert status == 400, answer
    assert answer["error"]["param"].startswith(param)
    status, _answer = await send(base, CHAT, {**body, "messages": MESSAGES, "prompt": None})
    assert status == 200


async def test_a_prompt_of_context_length_is_refused_and_one_less_is_served(base: str) -> None:
    """2,048 tokens cannot fit; the error has OpenAI's code."""
    body = {"model": "default", "prompt": [5] * 2048, "max_tokens": 1}
    status, answer = await send(base, COMPLETIONS, body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    body = {"model": "default", "prompt": [5] * 2047}
    status, answer = await send(base, COMPLETIONS, {**body, "max_tokens": 7})
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_body_of_more_than_a_mebibyte_is_served(base: str) -> None:
    """aiohttp's own limit would refuse it."""
    body = {"model": "default", "messages": MESSAGES, "max_tokens": 2, "junk": "x" * 1_300_000}
    data = io.BytesIO(json.dumps(body).encode())
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(base + CHAT, data=data, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("name", ["nope", "/etc/passwd", "org/model", "", None])
async def test_an_unknown_model_is_refused_and_nothing_is_loaded(base: str, name: Any) -> None:
    """404 or 400, at once."""
    status, _answer = await send(base, CHAT, {"model": name, "messages": MESSAGES})
    assert status in {400, 404}
