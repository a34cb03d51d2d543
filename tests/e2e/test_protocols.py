"""The real clients against a real daemon, on both lanes."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

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
