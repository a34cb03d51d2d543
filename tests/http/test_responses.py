"""`/v1/responses` as the real `openai` client sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from mlxd.config import ServerSettings
from mlxd.errors import EngineFailed, NotFound
from mlxd.http.responses_store import ResponseStore, Stored
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving
from tests.http.test_streams import Gate

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
async def gateway(marked: Tokenizer) -> FakeGateway:
    """Goes on thinking where the template began it, says something, and calls."""
    text = f"I must look.\n</think>\n\nA moment.\n{CALL}"
    return FakeGateway(says(await marked.encode(text)))


@pytest.fixture
async def client(marked: Tokenizer, gateway: FakeGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client in front of the fake model."""
    async with (
        serving(directory(marked, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def asked(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """A whole response."""
    given = {"model": MODEL, "input": "How is the weather?", "tools": TOOLS, **options}
    return await client.responses.create(**given)


async def prompt_of(gateway: FakeGateway, tokenizer: Tokenizer) -> str:
    """The last prompt, as text."""
    return await tokenizer.decode(list(gateway.generation.prompt))


def without_ids(response: Any) -> list[dict[str, Any]]:
    """Its output; ids are drawn anew for each response."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


async def test_a_response_has_its_reasoning_its_message_and_its_calls_as_items(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """In their order, with the usage of each part."""
    response = await asked(client)
    reasoning, message, call = response.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "I must look."
    assert response.output_text == message.content[0].text == "A moment."
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert (response.status, response.incomplete_details) == ("completed", None)
    usage = response.usage
    assert usage.input_tokens == len(gateway.generation.prompt)
    assert usage.input_tokens_details.cached_tokens == 3
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_stream_is_the_whole_response_event_by_event(client: openai.AsyncOpenAI) -> None:
    """The client's own accumulator makes the same of it."""
    whole = await asked(client)
    given: Any = {"model": MODEL, "input": "How is the weather?", "tools": TOOLS}
    async with client.responses.stream(**given) as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        streamed = await stream.get_final_response()
    assert "".join(deltas) == "A moment."
    kept = {"id", "call_id", "parsed", "parsed_arguments"}
    assert [item.model_dump(exclude=kept) for item in whole.output] == [
        json.loads(item.model_dump_json(exclude=kept), object_hook=_without_parsed)
        for item in streamed.output
    ]
    assert streamed.usage == whole.usage


def _without_parsed(found: dict[str, Any]) -> dict[str, Any]:
    """What the client's accumulator adds is left out."""
    found.pop("parsed", None)
    return found


async def test_the_events_of_a_stream_come_in_their_order(client: openai.AsyncOpenAI) -> None:
    """Numbered without gaps; every item and part is added, told and done, in its place."""
    stream = await asked(client, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = "function_call_arguments"
    assert list(dict.fromkeys(zip(kinds, [_place(event) for event in events], strict=True))) == [
        ("created", None),
        ("in_progress", None),
        *[(kind, 0) for kind in [*text, "reasoning_text.delta", "reasoning_text.done", *done]],
        *[(kind, 1) for kind in [*text, "output_text.delta", "output_text.done", *done]],
        *[(kind, 2) for kind in [text[0], f"{call}.delta", f"{call}.done", done[1]]],
        ("completed", None),
    ]
    assert kinds.count(f"{call}.delta") == 1
    opened = [event for event in events if event.type == "response.created"]
    assert (opened[0].response.status, opened[0].response.output) == ("in_progress", [])


def _place(event: Any) -> int | None:
    """The item that an event is about."""
    index: int | None = getattr(event, "output_index", None)
    return index


async def test_a_limit_makes_a_response_incomplete(client: openai.AsyncOpenAI) -> None:
    """And the item that it cut; streamed or not."""
    whole = await asked(client, max_output_tokens=2)
    events = [event async for event in await asked(client, max_output_tokens=2, stream=True)]
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[-1].status == "incomplete"


async def test_a_response_goes_on_from_an_earlier_one(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """With its whole conversation, reasoning and calls; its instructions were its own."""
    first = await asked(client, instructions="Be brief.")
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "Sunny.",
    }
    second = await asked(
        client, input=[result], previous_response_id=first.id, instructions="Be kind."
    )
    prompt = await prompt_of(gateway, marked)
    assert "Be kind." in prompt
    assert "Be brief." not in prompt
    assert "user\nHow is the weather?<|im_end|>" in prompt
    assert f"<think>\nI must look.\n</think>\n\nA moment.\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\nSunny.<|im_end|>" in prompt
    assert second.previous_response_id == first.id
    await asked(client, input="And now?", previous_response_id=second.id)
    assert (await prompt_of(gateway, marked)).count(CALL) == 2


async def test_a_stream_is_kept_as_well(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """Once it has come to its end."""
    events = [event async for event in await asked(client, stream=True)]
    await asked(client, input="And now?", previous_response_id=events[-1].response.id)
    assert CALL in await prompt_of(gateway, marked)


async def test_a_kept_response_can_be_had_again_and_deleted(client: openai.AsyncOpenAI) -> None:
    """Then it is gone; one that was not to be kept never was there."""
    response = await asked(client)
    assert await client.responses.retrieve(response.id) == response
    await client.responses.delete(response.id)
    private = await asked(client, store=False)
    for gone in (response.id, private.id):
        with pytest.raises(openai.NotFoundError) as caught:
            await asked(client, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone)


async def test_items_of_a_client_that_keeps_its_own_conversation_reach_the_template(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """What a response gave goes back as it came, beside messages in each of their forms."""
    first = await asked(client)
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Sunny."},
    ]
    await asked(client, input=items)
    prompt = await prompt_of(gateway, marked)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert f"<think>\nI must look.\n</think>\n\nA moment.\n{CALL}<|im_end|>" in prompt
    assert prompt.index("Sunny.") > prompt.index(CALL)


async def test_log_probabilities_come_when_they_are_included(client: openai.AsyncOpenAI) -> None:
    """Beside the text, streamed in their deltas."""
    include: Any = ["message.output_text.logprobs"]
    response = await asked(client, include=include, top_logprobs=2, max_output_tokens=20)
    entries = response.output[1].content[0].logprobs
    assert entries
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "banana"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "text.format.schema",
        ),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_used_is_named(
    client: openai.AsyncOpenAI,
    http: aiohttp.ClientSession,
    gateway: FakeGateway,
    fields: dict[str, Any],
    param: str,
) -> None:
    """400, and nothing reaches the engine."""
    body = {"model": MODEL, "input": "hi"} | fields
    url = f"{str(client.base_url).rstrip('/')}/responses"
    async with http.post(url, json=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
    assert gateway.tickets == []


async def test_a_failure_in_mid_stream_is_one_error_event_and_the_end(
    marked: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """With the code that the status would have had; nothing follows it."""
    gate = Gate(*await marked.encode("a b"), error=EngineFailed("the step failed"))
    gate.open.set()
    body = {"model": MODEL, "input": "hi", "stream": True}
    async with (
        serving(directory(marked, FakeGateway(gate))) as url,
        http.post(f"{url}/v1/responses", json=body) as answer,
    ):
        text = await answer.text()
    name, data = text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["code"] == "engine_failed"
    assert "response.completed" not in text


def stored(identity: str, owner: str | None = None, text: str = "") -> Stored:
    """A response of about as many bytes as its text has, and some more."""
    return Stored(owner, {"id": identity, "text": text}, ())


def test_the_store_is_bounded_and_keeps_what_was_used_last() -> None:
    """Whatever goes in, no more than its bytes stay."""
    store = ResponseStore(lambda: 250)
    for name in "ab":
        store.put(stored(name, text="x" * 80))
    store.get("a", None)
    store.put(stored("c", text="x" * 80))
    assert store.get("a", None).body["id"] == "a"
    assert store.get("c", None).body["id"] == "c"
    with pytest.raises(NotFound):
        store.get("b", None)
    store.put(stored("d", text="x" * 300))  # one that never fits makes no room
    assert store.get("a", None).body["id"] == "a"


def test_a_response_is_its_owners_alone() -> None:
    """To others it is not there."""
    store = ResponseStore(lambda: 1000)
    store.put(stored("a", "alice"))
    assert store.get("a", "alice").body["id"] == "a"
    for other in ("bob", None):
        with pytest.raises(NotFound):
            store.get("a", other)
        with pytest.raises(NotFound):
            store.delete("a", other)


async def test_a_store_of_no_bytes_keeps_nothing(marked: Tokenizer, gateway: FakeGateway) -> None:
    """For those who must not."""
    async with (
        serving(directory(marked, gateway), ServerSettings(response_store=0)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = await asked(client)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
