"""A call that must come: the same in every protocol, enforced as JSON of one shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from llguidance import LLMatcher

from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving

SCHEMA = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "string", "maxLength": 20}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": SCHEMA},
    {"name": "get_time", "parameters": SCHEMA},
]
CALL = '{"name": "get_weather", "arguments": {"place": "Paris"}}'
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]

CHAT: dict[str, Any] = {
    "messages": ASK,
    "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
}
RESPONSES: dict[str, Any] = {
    "input": ASK[0]["content"],
    "tools": [{"type": "function", **function} for function in FUNCTIONS],
}
MESSAGES: dict[str, Any] = {
    "messages": ASK,
    "max_tokens": 100,
    "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
}
NAME = {"name": "get_weather"}
ENFORCED = [
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}),
    (
        "/v1/chat/completions",
        CHAT | {"tool_choice": {"type": "function", "function": NAME}},
    ),
    ("/v1/responses", RESPONSES | {"tool_choice": "required"}),
    ("/v1/responses", RESPONSES | {"tool_choice": {"type": "function", **NAME}}),
    (
        "/v1/responses",
        RESPONSES
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", **NAME}],
            }
        },
    ),
    ("/v1/messages", MESSAGES | {"tool_choice": {"type": "any"}}),
    ("/v1/messages", MESSAGES | {"tool_choice": {"type": "tool", **NAME}}),
]


@pytest.fixture
async def gateway(marked: Tokenizer) -> FakeGateway:
    """Says the call, as the grammar would have it."""
    return FakeGateway(says(await marked.encode(CALL)))


@pytest.fixture
async def url(marked: Tokenizer, gateway: FakeGateway) -> AsyncIterator[str]:
    """A server whose model marks its reasoning and its calls."""
    async with serving(directory(marked, gateway)) as url:
        yield url


def called(body: dict[str, Any]) -> tuple[str, Any]:
    """The one call of an answer in any protocol: its name and its arguments."""
    match body:
        case {"choices": [{"message": message, "finish_reason": "tool_calls"}]}:
            assert message["content"] is None
            (call,) = message["tool_calls"]
            return call["function"]["name"], json.loads(call["function"]["arguments"])
        case {"output": [call], "status": "completed"}:
            return call["name"], json.loads(call["arguments"])
        case {"content": [call], "stop_reason": "tool_use"}:
            return call["name"], call["input"]
    raise AssertionError(body)


@pytest.mark.parametrize(("path", "fields"), ENFORCED)
async def test_a_call_that_must_come_is_the_whole_answer(
    url: str,
    http: aiohttp.ClientSession,
    gateway: FakeGateway,
    marked: Tokenizer,
    path: str,
    fields: dict[str, Any],
) -> None:
    """Without thoughts, by a grammar that has room for nothing else."""
    async with http.post(url + path, json={"model": MODEL} | fields) as answer:
        assert answer.status == 200, await answer.text()
        assert called(await answer.json()) == ("get_weather", {"place": "Paris"})
    grammar = gateway.generation.sampling.grammar
    assert grammar is not None
    assert LLMatcher.validate_grammar(grammar) == ""
    assert "structured" in gateway.generation.traits
    prompt = await marked.decode(list(gateway.generation.prompt))
    assert "get_weather" in prompt
    assert not prompt.endswith("<think>\n")


async def test_a_call_that_was_cut_is_content(url: str, http: aiohttp.ClientSession) -> None:
    """`length`, and what there is of it."""
    fields = CHAT | {"tool_choice": "required", "max_tokens": 5}
    async with http.post(f"{url}/v1/chat/completions", json={"model": MODEL} | fields) as answer:
        (choice,) = (await answer.json())["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"name"')
    assert "tool_calls" not in choice["message"]


async def test_a_model_without_tools_is_told_of_them_in_words(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """Beside what the client's own system message says; earlier calls and results as text."""
    gateway = FakeGateway(says(await tokenizer.encode(CALL)))
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Noon."},
    ]
    fields = CHAT | {"messages": messages, "tool_choice": "required"}
    async with (
        serving(directory(tokenizer, gateway)) as url,
        http.post(f"{url}/v1/chat/completions", json={"model": MODEL} | fields) as answer,
    ):
        assert called(await answer.json()) == ("get_weather", {"place": "Paris"})
    prompt = await tokenizer.decode(list(gateway.generation.prompt))
    assert "<|im_start|>system\nBe brief.\n\nYou can call these functions:" in prompt
    assert 'assistant\n{"name": "get_time", "arguments": {}}<|im_end|>' in prompt
    assert "<|im_start|>user\nNoon.<|im_end|>" in prompt
