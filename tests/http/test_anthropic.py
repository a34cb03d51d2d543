"""`/v1/messages` as the real `anthropic` client sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

from mlxd.errors import EngineFailed, QueueFull
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import CONTEXT, MODEL, FakeGateway, directory, says, serving
from tests.http.test_streams import Gate

ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def gateway(marked: Tokenizer) -> FakeGateway:
    """Goes on thinking where the template began it, says something, and calls twice."""
    text = f"I must look.\n</think>\n\nA moment.\n{CALL}\n{CALL}"
    return FakeGateway(says(await marked.encode(text)))


@pytest.fixture
async def client(
    marked: Tokenizer, gateway: FakeGateway
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The real client in front of the fake model."""
    async with (
        serving(directory(marked, gateway)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def asked(client: anthropic.AsyncAnthropic, **options: Any) -> anthropic.types.Message:
    """A whole message."""
    given = {"model": MODEL, "messages": ASK, "max_tokens": 200, "tools": TOOLS, **options}
    message: anthropic.types.Message = await client.messages.create(**given)
    return message


async def prompt_of(gateway: FakeGateway, tokenizer: Tokenizer) -> str:
    """The last prompt, as text."""
    return await tokenizer.decode(list(gateway.generation.prompt))


async def test_a_message_has_its_thinking_its_text_and_its_calls_as_blocks(
    client: anthropic.AsyncAnthropic,
) -> None:
    """In their order; the reason is `tool_use`; a thinking block is signed."""
    message = await asked(client, thinking=THINK)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, again = message.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert isinstance(again, anthropic.types.ToolUseBlock)
    assert (thinking.thinking, text.text) == ("I must look.", "A moment.")
    assert thinking.signature
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert call.id != again.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert (message.role, message.model) == ("assistant", MODEL)


async def test_a_stream_is_the_whole_message_event_by_event(
    client: anthropic.AsyncAnthropic,
) -> None:
    """The client's own accumulator makes the same message of it; ids are drawn anew."""
    whole = await asked(client, thinking=THINK)
    async with client.messages.stream(
        model=MODEL, messages=ASK, max_tokens=200, tools=TOOLS, thinking=THINK
    ) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    drawn = {"id"}
    assert [block.model_dump(exclude=drawn) for block in streamed.content] == [
        block.model_dump(exclude=drawn) for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)


async def test_the_events_of_a_stream_come_in_their_order(
    client: anthropic.AsyncAnthropic,
) -> None:
    """Of each block a start, its deltas, a stop, under its own index; no two are open at once."""
    stream = await client.messages.create(
        model=MODEL, messages=ASK, max_tokens=200, tools=TOOLS, thinking=THINK, stream=True
    )
    open_block: int | None = None
    blocks = 0
    deltas: list[str] = []
    async for event in stream:
        match event.type:
            case "content_block_start":
                assert open_block is None
                assert event.index == blocks
                open_block, blocks = event.index, blocks + 1
            case "content_block_delta":
                assert event.index == open_block
                deltas.append(event.delta.type)
            case "content_block_stop":
                assert event.index == open_block
                open_block = None
    assert open_block is None
    assert blocks == 4
    assert list(dict.fromkeys(deltas)) == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert deltas.count("input_json_delta") == 2  # each call whole, in one


async def streamed(client: anthropic.AsyncAnthropic, **options: Any) -> anthropic.types.Message:
    """The same as `asked`, streamed and put together by the client."""
    given: Any = {"model": MODEL, "messages": ASK, "max_tokens": 200, "tools": TOOLS, **options}
    async with client.messages.stream(**given) as stream:
        message: anthropic.types.Message = await stream.get_final_message()
    return message


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
@pytest.mark.parametrize("ask", [asked, streamed])
async def test_thoughts_that_nobody_asked_for_are_in_no_block(
    client: anthropic.AsyncAnthropic,
    gateway: FakeGateway,
    marked: Tokenizer,
    ask: Any,
    thinking: Any,
) -> None:
    """Of a model that thinks all the same, also in between; they count as output."""
    thought = "<think>\nI must look.\n</think>\n\n"
    tokens = await marked.encode(f"{thought}A moment. {thought}Yet another.\n{CALL}")
    gateway.script = says(tokens)
    message = await ask(client, **({} if thinking is None else {"thinking": thinking}))
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[0].text == "A moment. Yet another."
    assert message.usage.output_tokens == len(tokens) + 1


@pytest.mark.parametrize("ask", [asked, streamed])
async def test_a_display_that_omits_thoughts_leaves_their_signature(
    client: anthropic.AsyncAnthropic, ask: Any
) -> None:
    """With which the block can be sent back."""
    (shown, *_), (omitted, *_) = [
        (await ask(client, thinking=THINK | display)).content
        for display in ({"display": "summarized"}, {"display": "omitted"})
    ]
    assert (shown.thinking, omitted.thinking) == ("I must look.", "")
    assert omitted.signature == shown.signature


async def test_usage_tells_read_and_cached_tokens_apart(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway
) -> None:
    """Their sum is the prompt."""
    usage = (await asked(client)).usage
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(gateway.generation.prompt)


@pytest.mark.parametrize(
    ("options", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "France"]}, "stop_sequence", "France"),
    ],
)
async def test_the_stop_reason_tells_how_a_message_ended(
    client: anthropic.AsyncAnthropic,
    gateway: FakeGateway,
    marked: Tokenizer,
    options: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    """With the stop sequence that did, streamed or not."""
    gateway.script = says(await marked.encode("The capital of France is Paris."))
    message = await asked(client, **options)
    given: Any = {"max_tokens": 200, **options}
    async with client.messages.stream(model=MODEL, messages=ASK, **given) as stream:
        streamed = await stream.get_final_message()
    for each in (message, streamed):
        assert (each.stop_reason, each.stop_sequence) == (reason, sequence)


async def test_the_conversation_reaches_the_template(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """System blocks, calls, results (an error's too), earlier thinking, and text beside results."""
    first = await asked(client, thinking=THINK)
    calls = [block for block in first.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "Sunny."},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "is_error": True,
            "content": [{"type": "text", "text": "No network."}],
        },
        {"type": "text", "text": "Go on."},
    ]
    system: Any = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    await asked(client, system=system, messages=messages)
    prompt = await prompt_of(gateway, marked)
    assert "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>" in prompt
    assert f"<think>\nI must look.\n</think>\n\nA moment.\n{CALL}\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\nSunny.<|im_end|>\n<|im_start|>tool\nNo network.<|im_end|>" in prompt
    assert prompt.index("No network.") < prompt.index("<|im_start|>user\nGo on.<|im_end|>")


@pytest.mark.parametrize(("thinking", "thinks"), [(THINK, True), (None, False)])
async def test_a_model_thinks_only_when_asked_to(
    client: anthropic.AsyncAnthropic,
    gateway: FakeGateway,
    marked: Tokenizer,
    thinking: Any,
    thinks: bool,
) -> None:
    """Clients that did not ask take the first block for the text."""
    await asked(client, **({} if thinking is None else {"thinking": thinking}))
    assert (await prompt_of(gateway, marked)).endswith("<think>\n") == thinks


async def test_an_answer_goes_on_with_the_assistants_last_message(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """As a client puts words into its mouth; a leading space belongs to the text."""
    gateway.script = says(await marked.encode(" Paris."))
    messages = [*ASK, {"role": "assistant", "content": "The answer is"}]
    message = await asked(client, messages=messages)
    assert (await prompt_of(gateway, marked)).endswith("assistant\nThe answer is")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": " Paris."}
    ]


async def test_parallel_calls_can_be_switched_off(client: anthropic.AsyncAnthropic) -> None:
    """The message ends after the first."""
    message = await asked(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content].count("tool_use") == 1
    assert message.stop_reason == "tool_use"


async def test_tokens_are_counted_without_generating(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway
) -> None:
    """As many as the prompt of the same request has."""
    counted = await client.messages.count_tokens(
        model=MODEL, messages=ASK, tools=TOOLS, system="Be brief."
    )
    assert gateway.tickets == []
    await asked(client, system="Be brief.")
    assert counted.input_tokens == len(gateway.generation.prompt)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": CONTEXT + 1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "banana"}}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"type": ["custom"], "name": "f"}]}, "tools[0].type"),
        ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_used_is_named_in_anthropics_envelope(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway, fields: dict[str, Any], named: str
) -> None:
    """400, and nothing reaches the engine."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        await asked(client, **fields)
    assert caught.value.type == "invalid_request_error"
    assert named in str(caught.value)
    assert gateway.tickets == []


async def test_an_image_is_refused(client: anthropic.AsyncAnthropic) -> None:
    """No model here takes any."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="images"):
        await asked(client, messages=[{"role": "user", "content": [image]}])


async def test_other_failures_have_anthropics_names(
    client: anthropic.AsyncAnthropic, gateway: FakeGateway, http: aiohttp.ClientSession
) -> None:
    """An unknown model, a full queue, a method that the route has not."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        await asked(client, model="nobody")
    assert missing.value.type == "not_found_error"
    gateway.refuse = QueueFull("256 requests wait", retry_after=2)
    with pytest.raises(anthropic.APIStatusError) as full:
        await asked(client, stream=True)
    assert (full.value.status_code, full.value.type) == (503, "overloaded_error")
    assert full.value.response.headers["retry-after"] == "2"
    async with http.get(f"{str(client.base_url).rstrip('/')}/v1/messages") as answer:
        assert answer.status == 405
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_a_failure_in_mid_stream_is_one_error_event_and_the_end(
    marked: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """Nothing follows it, no stop of the message neither."""
    gate = Gate(*await marked.encode("a b"), error=EngineFailed("the step failed"))
    gate.open.set()
    body = {"model": MODEL, "messages": ASK, "max_tokens": 9, "stream": True}
    async with (
        serving(directory(marked, FakeGateway(gate))) as url,
        http.post(f"{url}/v1/messages", json=body) as answer,
    ):
        text = await answer.text()
    last = text.removesuffix("\n\n").split("\n\n")[-1]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"] == {
        "type": "overloaded_error",
        "message": "the step failed",
    }
    assert "message_stop" not in text
