"""Tools and reasoning as the real `openai` client sees them in chat completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving
from tests.text.marked import marked_model, tool

ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: Any = [tool("get_weather", city="string")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# The template opens the reasoning at the prompt's end.
THOUGHT = "I must look.\n</think>\n\n"


@pytest.fixture
async def gateway(marked: Tokenizer) -> FakeGateway:
    """Thinks, says something, and calls twice."""
    return FakeGateway(
        says(await marked.encode(f"{THOUGHT}A moment.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"))
    )


@pytest.fixture
async def client(marked: Tokenizer, gateway: FakeGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client in front of the fake model."""
    async with (
        serving(directory(marked, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def asked(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """The one choice of a whole answer."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASK, **{"tools": TOOLS, **options}
    )
    return answer.choices[0]


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> tuple[dict[str, Any], str]:
    """A streamed answer put together as clients do: its message and its finish reason."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, **{"tools": TOOLS, **options}
    )
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    async for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta.model_dump(exclude_none=True)
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field, "")
        for call in delta.get("tool_calls", []):
            assert call.pop("index") == len(message["tool_calls"])  # whole, in one delta
            message["tool_calls"].append(call)
        reason = choice.finish_reason or reason
    return message, reason


async def test_an_answer_has_its_reasoning_its_content_and_its_calls(
    client: openai.AsyncOpenAI,
) -> None:
    """Arguments are JSON, ids differ, the reason is `tool_calls`."""
    choice = await asked(client)
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "A moment.")
    assert message.reasoning_content == "I must look."
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    arguments = [json.loads(call.function.arguments) for call in message.tool_calls]
    assert arguments == [{"city": "Paris"}, {"city": "Rome"}]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_a_stream_joins_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    """Each call is one delta; ids are drawn anew for each answer."""
    message, reason = await streamed(client)
    whole = (await asked(client)).message
    assert reason == "tool_calls"
    assert message["content"] == whole.content
    assert message["reasoning_content"] == whole.reasoning_content
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [call.function.model_dump() for call in whole.tool_calls]


async def test_an_answer_of_calls_alone_has_no_content(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """Null, as with OpenAI."""
    gateway.script = says(await marked.encode(THOUGHT + CALL))
    assert (await asked(client)).message.content is None


async def test_without_parallel_calls_the_answer_ends_after_the_first(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """The row is given up there, and its usage ends there."""
    choice = await asked(client, parallel_tool_calls=False)
    message, reason = await streamed(client, parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == len(message["tool_calls"]) == 1
    assert choice.finish_reason == reason == "tool_calls"
    until = len(await marked.encode(f"{THOUGHT}A moment.\n{CALL}"))
    assert gateway.tickets[0].stopped_at in {until, until + 1}  # its last token may hold more


async def test_a_call_cut_by_the_limit_is_content(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """`length`, and what there is of it, streamed or not."""
    tokens = await marked.encode(THOUGHT + CALL)
    gateway.script = says(tokens)
    choice = await asked(client, max_tokens=len(tokens) - 4)
    message, reason = await streamed(client, max_tokens=len(tokens) - 4)
    assert choice.finish_reason == reason == "length"
    assert choice.message.tool_calls is None
    assert message["tool_calls"] == []
    assert choice.message.content == message["content"]
    assert choice.message.content.startswith('\n{"name": "get_weather"')


async def test_broken_json_is_content_and_a_stop(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """No failure, and no markup."""
    gateway.script = says(await marked.encode(f"{THOUGHT}<tool_call>{{oops</tool_call>"))
    choice = await asked(client)
    assert (choice.finish_reason, choice.message.content) == ("stop", "{oops")


async def test_a_limit_inside_the_reasoning_leaves_the_content_empty(
    client: openai.AsyncOpenAI,
) -> None:
    """What was thought is not an answer."""
    choice = await asked(client, max_tokens=2)
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.reasoning_content


async def test_log_probabilities_cover_every_token_of_every_part(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """Streamed or not, those of markers too: they were generated."""
    tokens = await marked.encode(THOUGHT + CALL)
    gateway.script = says(tokens)
    choice = await asked(client, logprobs=True)
    assert len(choice.logprobs.content) == len(tokens)
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, logprobs=True, stream=True
    )
    chunks = [chunk.choices[0].logprobs async for chunk in stream]
    shown = [entry for logprobs in chunks if logprobs for entry in logprobs.content or []]
    assert shown == choice.logprobs.content


@pytest.mark.parametrize(("choice", "offered"), [("auto", True), ("none", False), (None, True)])
async def test_tools_are_shown_to_the_model_unless_it_may_not_call(
    client: openai.AsyncOpenAI,
    gateway: FakeGateway,
    marked: Tokenizer,
    choice: Any,
    offered: bool,
) -> None:
    """Nor are calls looked for where there were none to make."""
    answer = await asked(client, tool_choice=choice)
    prompt = await marked.decode(list(gateway.generation.prompt))
    assert ("get_weather" in prompt) == offered
    assert (answer.message.tool_calls is not None) == offered


async def test_a_round_trip_reaches_the_template(
    client: openai.AsyncOpenAI, gateway: FakeGateway, marked: Tokenizer
) -> None:
    """Calls, results and the earlier reasoning stand in the next prompt as the model wrote them."""
    first = (await asked(client, parallel_tool_calls=False)).message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny."}
    history = [*ASK, first.model_dump(exclude_none=True), result]
    await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    prompt = await marked.decode(list(gateway.generation.prompt))
    assert f"{THOUGHT}A moment.\n{CALL}" in prompt
    assert "Sunny." in prompt


LLAMA = """\
{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"""


async def test_a_model_whose_calls_have_no_markers_calls_in_bare_json(
    starter_path: Path, tmp_path: Path
) -> None:
    """As Llama's do: its template takes tools, and mlx-lm has no parser for it."""
    model = marked_model(starter_path, tmp_path, template=LLAMA)
    tokenizer = await Tokenizer.load(model, trust_remote_code=False)
    text = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    gateway = FakeGateway(says(await tokenizer.encode(text)))
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        choice = await asked(client)
        message, reason = await streamed(client)
        plain = await asked(client, tools=[])
    assert choice.finish_reason == reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert (message["content"], len(message["tool_calls"])) == ("", 1)
    assert plain.message.content == text
    tokenizer.close()


async def test_a_model_that_cannot_call_tools_says_so(tokenizer: Tokenizer) -> None:
    """400 that names the field; nothing reaches the engine. No tools are none."""
    gateway = FakeGateway(says([500]))
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await asked(client)
        assert (caught.value.param, caught.value.code) == ("tools", "tools_not_supported")
        assert gateway.tickets == []
        await asked(client, tools=[])
        await asked(client, tool_choice="none")
