"""Chat and completions as the real `openai` client sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from mlxd.errors import QueueFull
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import CONTEXT, MODEL, FakeGateway, directory, says, serving

ANSWER = "The capital of France is Paris. 😀 ďábelské 日本語\n"
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def gateway(tokenizer: Tokenizer) -> FakeGateway:
    """Answers every request with `ANSWER`, then ends the sequence."""
    return FakeGateway(says(await tokenizer.encode(ANSWER)))


@pytest.fixture
async def client(tokenizer: Tokenizer, gateway: FakeGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client in front of the fake model."""
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def chat_chunks(client: openai.AsyncOpenAI, **options: object) -> list[Any]:
    """All chunks of a streamed chat."""
    asked: Any = options
    stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **asked)
    return [chunk async for chunk in stream]


def chat_text(chunks: list[Any]) -> str:
    """Their joined content."""
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_a_chat_answers_whole(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    """Text, reason and usage, the end of sequence and the cached tokens counted."""
    answer = await client.chat.completions.create(model=MODEL, messages=ASK)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == len(await tokenizer.encode_chat(ASK))
    assert usage.completion_tokens == len(await tokenizer.encode(ANSWER)) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3


async def test_a_streamed_chat_joins_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    """The role first, then text without replacements, then the reason; one id throughout."""
    chunks = await chat_chunks(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chat_text(chunks) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks)


async def test_a_completion_is_the_same_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    """The same text and reason in both shapes, one id in the stream."""
    whole = await client.completions.create(model=MODEL, prompt="Say it:")
    stream = await client.completions.create(model=MODEL, prompt="Say it:", stream=True)
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == ANSWER
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_drops_a_leading_space_and_completions_keep_it(
    client: openai.AsyncOpenAI, gateway: FakeGateway, tokenizer: Tokenizer
) -> None:
    """The space belongs to the text that a completion goes on with."""
    gateway.script = says(await tokenizer.encode(" hi"))
    chat = await client.chat.completions.create(model=MODEL, messages=ASK)
    completion = await client.completions.create(model=MODEL, prompt="Say")
    assert (chat.choices[0].message.content, completion.choices[0].text) == ("hi", " hi")


@pytest.mark.parametrize(
    ("options", "trailing"),
    [
        ({}, 0),
        ({"stream_options": {}}, 0),
        ({"stream_options": {"include_usage": False}}, 0),
        ({"stream_options": {"include_usage": True}}, 1),
    ],
)
async def test_usage_is_streamed_only_when_asked_for(
    client: openai.AsyncOpenAI, options: dict[str, Any], trailing: int
) -> None:
    """Exactly one trailing chunk without choices, or none, on both endpoints."""
    completion = await client.completions.create(
        model=MODEL, prompt="Say it:", stream=True, **options
    )
    for chunks in (await chat_chunks(client, **options), [c async for c in completion]):
        with_usage = [chunk for chunk in chunks if chunk.usage is not None]
        assert len(with_usage) == trailing
        assert [chunk for chunk in chunks if not chunk.choices] == with_usage
        assert with_usage in ([], chunks[-1:])


@pytest.mark.parametrize("stop", ["Paris", ["zzz", "Paris. ", "is Paris", "capital of Spain"]])
async def test_a_stop_string_gives_the_same_text_everywhere(
    client: openai.AsyncOpenAI, gateway: FakeGateway, stop: str | list[str]
) -> None:
    """Both endpoints, streamed or not: `stop`, nothing of it sent, usage up to its token."""
    first = "is Paris" if isinstance(stop, list) else "Paris"
    want = ANSWER[: ANSWER.index(first)]
    chunks = await chat_chunks(client, stop=stop)
    chat = await client.chat.completions.create(model=MODEL, messages=ASK, stop=stop)
    completion = await client.completions.create(model=MODEL, prompt="Say:", stop=stop)
    assert chat_text(chunks) == want
    assert chat.choices[0].message.content == completion.choices[0].text == want
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "stop"
    assert {ticket.stopped_at for ticket in gateway.tickets} == {6}
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 6


async def test_a_stop_string_at_the_limit_is_a_stop(client: openai.AsyncOpenAI) -> None:
    """At one token the stop string comes before the limit that the engine reported."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASK, stop="Paris", max_tokens=6
    )
    assert answer.choices[0].finish_reason == "stop"


async def test_a_limit_ends_every_shape_in_the_same_place(client: openai.AsyncOpenAI) -> None:
    """`length` after five tokens, streamed or not, on both endpoints."""
    chunks = await chat_chunks(client, max_tokens=5)
    chat = await client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=5)
    completion = await client.completions.create(model=MODEL, prompt="Say:", max_tokens=5)
    assert chat_text(chunks) == "The capital of France is"
    assert chat.choices[0].message.content == completion.choices[0].text == chat_text(chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "length"


async def test_a_limit_inside_an_emoji_is_one_replacement_at_the_end(
    client: openai.AsyncOpenAI, gateway: FakeGateway, tokenizer: Tokenizer
) -> None:
    """The held tail is flushed once, streamed or not."""
    tokens = await tokenizer.encode("hi 😀")
    gateway.script = says(tokens)
    options: Any = {"max_tokens": len(tokens) - 1}
    chunks = await chat_chunks(client, **options)
    whole = await client.chat.completions.create(model=MODEL, messages=ASK, **options)
    assert chat_text(chunks) == whole.choices[0].message.content == "hi \ufffd"


@pytest.mark.parametrize("top", [0, 5])
async def test_chat_log_probabilities_have_an_entry_for_each_token(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer, top: int
) -> None:
    """Streamed or not, with the bytes of tokens that are parts of characters."""
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": top}
    chunks = await chat_chunks(client, **options)
    whole = await client.chat.completions.create(model=MODEL, messages=ASK, **options)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries is not None
    assert streamed == entries
    assert len(entries) == len(await tokenizer.encode(ANSWER))
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == ANSWER
    assert all(len(entry.top_logprobs) == top for entry in entries)


@pytest.mark.parametrize("top", [0, 5])
async def test_completion_log_probabilities_have_an_entry_for_each_token(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer, top: int
) -> None:
    """The four lists of the older shape are of one length."""
    answer = await client.completions.create(model=MODEL, prompt="Say:", logprobs=top)
    found = answer.choices[0].logprobs
    assert found is not None
    lists = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
    count = len(await tokenizer.encode(ANSWER))
    assert [len(each or []) for each in lists] == [count] * 4
    assert found.top_logprobs is not None
    assert all(len(each) == max(top, 1) for each in found.top_logprobs)


async def test_the_lane_and_its_reason_are_headers(client: openai.AsyncOpenAI) -> None:
    """Of whole answers and of streams."""
    whole = await client.completions.with_raw_response.create(model=MODEL, prompt="Say:")
    async with client.completions.with_streaming_response.create(
        model=MODEL, prompt="Say:", stream=True
    ) as stream:
        for headers in (whole.headers, stream.headers):
            assert headers["x-mlxd-lane"] == "batch"
            assert headers["x-mlxd-lane-reason"] == "none"


async def test_what_the_client_sent_reaches_the_engine(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """Sampling values, limits and traits; a negative seed as 64 unsigned bits."""
    await client.chat.completions.create(
        model="default",
        messages=ASK,
        temperature=0.5,
        seed=-1,
        presence_penalty=0.5,
        logit_bias={"5": -100},
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "repetition_context_size": 64,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
        },
    )
    generation = gateway.generation
    sampling = generation.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 2**64 - 1, 40)
    assert (sampling.min_p, sampling.repetition_context_size) == (0.1, 64)
    assert sampling.logit_bias == {5: -100.0}
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.5, 0.2)
    assert set(sampling.xtc_special) == {198, 2}  # a line's end, and the end of the answer
    assert generation.traits == {"seed", "penalties", "logit_bias"}
    assert (generation.max_tokens, sorted(generation.eos)) == (512, [2])


async def test_values_that_change_nothing_carry_no_trait(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """Neutral values; a top_k of the whole vocabulary is off."""
    await client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        logprobs=False,
        presence_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        extra_body={"top_k": 49152, "repetition_penalty": 1},
    )
    assert gateway.generation.traits == frozenset()
    assert gateway.generation.sampling.top_k == 0


async def test_a_response_format_reaches_the_engine_as_a_grammar(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """On both endpoints; it is a trait."""
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"a": {"enum": [None, 5]}},
    }
    await client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    by_schema = gateway.generation
    await client.completions.create(
        model=MODEL, prompt="Say:", extra_body={"response_format": {"type": "json_object"}}
    )
    for generation in (by_schema, gateway.generation):
        assert generation.traits == {"structured"}
        assert generation.sampling.grammar is not None
    assert '"enum":[null,5]' in str(by_schema.sampling.grammar)


async def test_a_schema_that_cannot_be_enforced_is_the_clients_error(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """It names the field, and nothing is admitted."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "banana"}},
            },
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "banana" in caught.value.message
    assert gateway.tickets == []


async def test_requests_without_a_seed_get_different_ones(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """Every row has a random stream of its own."""
    for _ in range(3):
        await client.completions.create(model=MODEL, prompt="Say:")
    assert len({ticket.generation.sampling.seed for ticket in gateway.tickets}) == 3


async def test_token_prompts_are_taken_as_they_are(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """One list of ids, or a batch of one list."""
    await client.completions.create(model=MODEL, prompt=[5, 6, 7])
    await client.completions.create(model=MODEL, prompt=[[5, 6, 7]])
    assert [list(ticket.generation.prompt) for ticket in gateway.tickets] == [[5, 6, 7]] * 2


async def test_text_that_can_never_fit_is_refused_without_being_tokenised(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    """It would keep the tokenizer from everybody else."""
    text = "a" * (CONTEXT * tokenizer.longest + 1)
    with pytest.raises(openai.BadRequestError) as prompt:
        await client.completions.create(model=MODEL, prompt=text)
    with pytest.raises(openai.BadRequestError) as messages:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}]
        )
    assert "characters" in str(prompt.value)
    assert prompt.value.code == messages.value.code == "context_length_exceeded"


@pytest.mark.parametrize("token", [-3, 49152, 2_000_000_000])
async def test_ids_that_the_model_does_not_have_are_refused(
    client: openai.AsyncOpenAI, gateway: FakeGateway, token: int
) -> None:
    """In a prompt and as a bias; none of it reaches the engine."""
    with pytest.raises(openai.BadRequestError) as prompt:
        await client.completions.create(model=MODEL, prompt=[5, token])
    with pytest.raises(openai.BadRequestError) as bias:
        await client.completions.create(model=MODEL, prompt="x", logit_bias={str(token): 1})
    assert (prompt.value.param, bias.value.param) == ("prompt", "logit_bias")
    assert gateway.tickets == []


async def test_a_prompt_must_leave_room_in_the_context(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """One token less than the context is served, with the limit clamped to what is left."""
    await client.completions.create(model=MODEL, prompt=[5] * (CONTEXT - 1))
    assert gateway.generation.max_tokens == 1
    for length in (CONTEXT, CONTEXT + 1):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt=[5] * length, stream=True)
        assert caught.value.code == "context_length_exceeded"


async def test_a_limit_above_the_context_is_refused_and_one_within_is_clamped(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """The error names the field that the client used."""
    await client.completions.create(model=MODEL, prompt=[5] * 10, max_tokens=CONTEXT)
    assert gateway.generation.max_tokens == CONTEXT - 10
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=ASK, max_completion_tokens=10**12
        )
    assert caught.value.param == "max_completion_tokens"


async def test_a_conversation_with_tool_calls_is_served(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """An assistant message without content and the tool's answer reach the template."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Paris"}]},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=[])
    assert len(gateway.tickets) == 1


@pytest.mark.parametrize("name", ["nobody", "/etc/passwd", "../starter", "org/model"])
async def test_a_model_that_is_not_configured_is_not_found(
    client: openai.AsyncOpenAI, name: str
) -> None:
    """A path or a hub id is a name like another; nothing is loaded."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model=name, prompt="x")
    assert caught.value.code == "model_not_found"


async def test_a_full_queue_says_when_to_come_back(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """503 with Retry-After, also for a stream: no headers are out yet."""
    gateway.refuse = QueueFull("256 requests wait", retry_after=2)
    with pytest.raises(openai.InternalServerError) as caught:
        await chat_chunks(client)
    assert caught.value.status_code == 503
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "2"


async def test_models_are_listed_and_found_by_alias(client: openai.AsyncOpenAI) -> None:
    """The id is the model's own."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve("default")).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")
