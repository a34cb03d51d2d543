"""Enforced formats: one grammar, whichever protocol asks, begun where the answer itself begins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from mlxd.grammar import of_schema
from mlxd.text.markup import CONTENT, REASONING
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving
from tests.http.test_toolchoice import CALL, CHAT, MESSAGES, RESPONSES, called
from tests.text.marked import TEMPLATE, marked_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DOCUMENT = '{"city": "<tool_call> is a marker"}'
ASK = [{"role": "user", "content": "Which city?"}]
NAMED = {"name": "answer", "schema": SCHEMA}


class Protocol(NamedTuple):
    """How one protocol asks."""

    path: str
    plain: dict[str, Any]
    form: dict[str, Any]  # for the format
    effort: dict[str, Any]  # for reasoning
    quiet: dict[str, Any]  # for none


PROTOCOLS = [
    Protocol(
        "/v1/chat/completions",
        {"messages": ASK},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
    ),
    Protocol(
        "/v1/responses",
        {"input": ASK[0]["content"]},
        {"text": {"format": {"type": "json_schema", **NAMED}}},
        {"reasoning": {"effort": "high"}},
        {"reasoning": {"effort": "none"}},
    ),
    Protocol(
        "/v1/messages",
        {"messages": ASK, "max_tokens": 200},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {},
    ),
]


@pytest.fixture
async def gateway(marked: Tokenizer) -> FakeGateway:
    """Ends its reasoning where a prompt has begun one, and says the document."""
    thought = await marked.encode("I know.\n</think>\n\n")
    document = await marked.encode(DOCUMENT)

    async def script(generation: Any) -> AsyncIterator[list[int]]:
        thinks = (await marked.decode(list(generation.prompt))).endswith("<think>\n")
        for token in [*thought, *document] if thinks else document:
            yield [token]

    return FakeGateway(script)  # type: ignore[arg-type]  # a generator function is annotated so


@pytest.fixture
async def url(marked: Tokenizer, gateway: FakeGateway) -> AsyncIterator[str]:
    """A server whose model marks its reasoning and its calls."""
    async with serving(directory(marked, gateway)) as url:
        yield url


def said(body: dict[str, Any]) -> tuple[str, str]:
    """The reasoning and the text of an answer in any protocol."""
    match body:
        case {"choices": [{"message": message, "finish_reason": "stop"}]}:
            return message.get("reasoning_content") or "", message["content"]
        case {"output": [*items], "status": "completed"}:
            found = {item["type"]: item["content"][0]["text"] for item in items}
            return found.get("reasoning", ""), found["message"]
        case {"content": [*blocks], "stop_reason": "end_turn"}:
            kinds = {block["type"]: block for block in blocks}
            return kinds.get("thinking", {}).get("thinking", ""), kinds["text"]["text"]
    raise AssertionError(body)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.path)
async def test_a_format_is_enforced_from_the_first_token_on(
    url: str,
    http: aiohttp.ClientSession,
    gateway: FakeGateway,
    protocol: Protocol,
) -> None:
    """By its schema's grammar; what its strings hold is no markup."""
    body = {"model": MODEL, **protocol.plain, **protocol.form, **protocol.quiet}
    async with http.post(url + protocol.path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert said(await answer.json()) == ("", DOCUMENT)
    sampling = gateway.generation.sampling
    assert sampling.grammar == of_schema(SCHEMA, "schema")
    assert sampling.grammar_after == []
    assert "structured" in gateway.generation.traits


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.path)
async def test_a_format_begins_behind_the_reasoning_that_the_prompt_opened(
    url: str,
    http: aiohttp.ClientSession,
    gateway: FakeGateway,
    marked: Tokenizer,
    protocol: Protocol,
) -> None:
    """The reasoning is free, and is told apart."""
    body = {"model": MODEL, **protocol.plain, **protocol.form, **protocol.effort}
    async with http.post(url + protocol.path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert said(await answer.json())[0] == "I know."
    end = await marked.encode("</think>", add_special_tokens=False)
    assert gateway.generation.sampling.grammar_after == end
    assert gateway.generation.sampling.grammar == of_schema(SCHEMA, "schema")


@pytest.mark.parametrize("kind", ["json_object", "text"])
async def test_a_response_tells_the_format_that_it_had(
    url: str, http: aiohttp.ClientSession, gateway: FakeGateway, kind: str
) -> None:
    """Any JSON object, or any text."""
    body = {"model": MODEL, "input": "x", "text": {"format": {"type": kind}}}
    async with http.post(f"{url}/v1/responses", json=body) as answer:
        assert (await answer.json())["text"] == {"format": {"type": kind}}
    assert (gateway.generation.sampling.grammar is None) == (kind == "text")


REQUIRED = [
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}),
    ("/v1/responses", RESPONSES | {"tool_choice": "required"}),
    ("/v1/messages", MESSAGES | {"tool_choice": {"type": "any"}}),
]


@pytest.fixture
async def thinker(starter_path: Path, tmp_path: Path) -> AsyncIterator[Tokenizer]:
    """Of a model that always thinks first, whatever it is told."""
    template = TEMPLATE.replace("{% if enable_thinking %}<think>\n{% endif %}", "<think>\n")
    model = marked_model(starter_path, tmp_path, thinking=True, template=template)
    loaded = await Tokenizer.load(model, trust_remote_code=False)
    yield loaded
    loaded.close()


@pytest.mark.parametrize(("path", "fields"), REQUIRED)
async def test_a_call_that_must_come_comes_behind_the_reasoning(
    thinker: Tokenizer, http: aiohttp.ClientSession, path: str, fields: dict[str, Any]
) -> None:
    """Of a model that cannot do without."""
    gateway = FakeGateway(says(await thinker.encode(f"I know.\n</think>{CALL}")))
    async with (
        serving(directory(thinker, gateway)) as url,
        http.post(url + path, json={"model": MODEL, **fields}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        body = await answer.json()
    if "output" in body:
        body["output"] = [item for item in body["output"] if item["type"] != "reasoning"]
    assert called(body) == ("get_weather", {"place": "Paris"})
    assert gateway.generation.sampling.grammar_after
    prompt = list(gateway.generation.prompt)
    assert await thinker.opening(prompt) == REASONING
    assert await thinker.opening(prompt[:-3]) == CONTENT


async def test_a_document_is_the_same_streamed(url: str, http: aiohttp.ClientSession) -> None:
    """Piece by piece; nothing of it is held back as a possible call."""
    chat = PROTOCOLS[0]
    body = {"model": MODEL, **chat.plain, **chat.form, **chat.effort, "stream": True}
    text = thought = ""
    async with http.post(url + chat.path, json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                delta = json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]
                text += delta.get("content") or ""
                thought += delta.get("reasoning_content") or ""
    assert (thought, text) == ("I know.", DOCUMENT)
