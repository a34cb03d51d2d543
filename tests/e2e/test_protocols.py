"""The real clients against a real daemon, on both lanes."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anthropic
import pytest
from openai import AsyncOpenAI

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}


def claude(base: str) -> anthropic.AsyncAnthropic:
    """The real Anthropic client."""
    return anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0)


async def test_the_anthropic_client_gets_the_same_message_streamed_and_not(base: str) -> None:
    """Text, stop reason and usage."""
    asked: Any = {"model": "default", "messages": ASK, "max_tokens": 24, "extra_body": GREEDY}
    async with claude(base) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="default", messages=ASK)
    (text,) = whole.content
    assert isinstance(text, anthropic.types.TextBlock)
    assert "Paris" in text.text
    assert [block.text for block in streamed.content if block.type == "text"] == [text.text]
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert read == counted.input_tokens


async def test_an_anthropic_stop_sequence_and_limit_end_the_message(base: str) -> None:
    """Each with its reason."""
    asked: Any = {"model": "default", "messages": ASK, "extra_body": GREEDY}
    async with claude(base) as client:
        stopped = await client.messages.create(max_tokens=24, stop_sequences=["Paris"], **asked)
        limited = await client.messages.create(max_tokens=3, **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    assert (limited.stop_reason, limited.usage.output_tokens) == ("max_tokens", 3)


async def test_the_starter_takes_no_tools_and_says_so(base: str) -> None:
    """Its template does not show them to it."""
    tool: Any = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    async with claude(base) as client:
        with pytest.raises(anthropic.BadRequestError, match="cannot call tools"):
            await client.messages.create(model="default", messages=ASK, max_tokens=5, tools=[tool])


SERIAL = {"logprobs": True, "logit_bias": {"5": 0.001}}  # traits that may run alone
LANES = pytest.mark.parametrize("extra", [{}, SERIAL], ids=["plain", "traits"])


def openai(base: str) -> AsyncOpenAI:
    """The real OpenAI client."""
    return AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


async def test_a_response_streams_to_the_same_text_and_is_gone_on_from(base: str) -> None:
    """The earlier question and answer are in the second prompt."""
    asked: Any = {"model": "default", "input": ASK[0]["content"], "temperature": 0}
    async with openai(base) as client:
        whole = await client.responses.create(max_output_tokens=24, **asked)
        async with client.responses.stream(max_output_tokens=24, **asked) as stream:
            streamed = await stream.get_final_response()
        second = await client.responses.create(
            model="default",
            input="And of Italy?",
            previous_response_id=whole.id,
            max_output_tokens=8,
        )
    assert "Paris" in whole.output_text
    assert streamed.output_text == whole.output_text
    assert whole.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > whole.usage.total_tokens


@LANES
async def test_n_answers_to_a_seed_are_those_of_its_seeds(base: str, extra: dict[str, Any]) -> None:
    """The first is that of a request for one; they differ."""
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0.8,
        "top_k": 50,
        "max_tokens": 12,
        **extra,
    }
    async with aiohttp.ClientSession() as session:

        async def ask(**fields: int) -> list[str]:
            url = f"{base}/v1/chat/completions"
            async with session.post(url, json=asked | fields) as answer:
                assert answer.status == 200, await answer.text()
                choices = (await answer.json())["choices"]
            return [choice["message"]["content"] for choice in choices]

        three = await ask(n=3, seed=7)
        alone = [(await ask(seed=7 + number))[0] for number in range(3)]
    assert three == alone
    assert len(set(three)) == 3


async def test_the_best_of_several_prompts_answers_echo_their_prompts(base: str) -> None:
    """One for each, in their order."""
    async with openai(base) as client:
        answer = await client.completions.create(
            model="default",
            prompt=["The capital of France is", "Two plus two is"],
            best_of=2,
            echo=True,
            max_tokens=4,
        )
    first, second = answer.choices
    assert first.text.startswith("The capital of France is")
    assert second.text.startswith("Two plus two is")


async def test_tokens_are_those_that_a_chat_counts(base: str) -> None:
    """`/tokenize` and usage agree."""
    async with aiohttp.ClientSession() as session, openai(base) as client:
        body = {"model": "default", "messages": ASK}
        async with session.post(f"{base}/tokenize", json=body) as answer:
            counted = (await answer.json())["count"]
        chat = await client.chat.completions.create(model="default", messages=ASK, max_tokens=1)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == counted


async def test_a_tool_call_that_must_come_makes_a_round_trip(base: str) -> None:
    """Required, streamed or not, its arguments of the tool's schema; then its result."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "description": "The weather.", "parameters": schema}
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "max_tokens": 60,
    }
    async with openai(base) as client:
        whole = await client.chat.completions.create(tool_choice="required", **asked)
        async with client.chat.completions.stream(tool_choice="required", **asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert streamed.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in {"Paris", "Rome"}
        assert streamed.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
        asked["messages"] += [choice.message.model_dump(exclude_none=True), result]
        answer = await client.chat.completions.create(tool_choice="none", **asked)
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.choices[0].message.content
