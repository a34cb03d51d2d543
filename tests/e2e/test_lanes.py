"""Both lanes of a real daemon give the same answers, on the real starter model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

SERIAL = {"logit_bias": {"49151": 1e-9}}  # changes nothing, and this daemon's policy runs it alone
LANES = pytest.mark.parametrize("extra", [{}, SERIAL], ids=["batch", "serial"])

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one line about rain.",
    "What is two plus two?",
    "Who wrote Hamlet?",
    "What is water made of?",
    "Define gravity in a sentence.",
    "What does a baker make?",
    "Which planet is the largest?",
    "Give a synonym of 'happy'.",
    "How many legs has a spider?",
    "What is the opposite of cold?",
    "Name a river in Egypt.",
    "What language is spoken in Brazil?",
    "Say hello in Spanish.",
    "What gas do plants take in?",
]


def client(base: str) -> AsyncOpenAI:
    """The real OpenAI client."""
    return AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


async def ask(base: str, content: str, **fields: Any) -> tuple[str, str, str]:
    """One greedy chat completion: text, finish reason, lane."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 24,
        **fields,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        choice = (await answer.json())["choices"][0]
        lane = answer.headers["x-mlxd-lane"]
        return choice["message"]["content"], choice["finish_reason"], lane


async def streamed(base: str, content: str, **fields: Any) -> tuple[str, str]:
    """The same, streamed: the deltas joined, and the finish reason."""
    text, reason = "", ""
    async with client(base) as openai:
        stream = await openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            stream=True,
            **{"max_tokens": 24, **fields},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    return text, reason


async def model_status(base: str) -> dict[str, Any]:
    """The model's entry in the daemon's status."""
    async with aiohttp.ClientSession() as session, session.get(f"{base}/admin/status") as answer:
        model: dict[str, Any] = (await answer.json())["models"][0]
        return model


@LANES
async def test_the_capital_of_france_is_paris_streamed_and_not(
    base: str, extra: dict[str, Any]
) -> None:
    """The first thing that a newcomer sees."""
    whole, reason, lane = await ask(base, QUESTIONS[0], **extra)
    assert "Paris" in whole
    assert reason == "stop"
    assert lane == ("serial" if extra else "batch")
    assert await streamed(base, QUESTIONS[0], **extra) == (whole, "stop")


async def test_sixteen_prompts_at_once_equal_what_the_serial_lane_gives_alone(base: str) -> None:
    """Greedy, float32, every answer the same text."""
    together = await asyncio.gather(*(ask(base, question) for question in QUESTIONS))
    assert {lane for _text, _reason, lane in together} == {"batch"}
    for question, (text, reason, _lane) in zip(QUESTIONS, together, strict=True):
        assert (text, reason, "serial") == await ask(base, question, **SERIAL)


async def test_each_of_sixteen_rows_keeps_its_own_code_word(base: str) -> None:
    """No row sees another's cache: each of a batch equals itself alone."""
    prompts = [f"Repeat this word exactly: zebra{number}" for number in range(16)]
    together = await asyncio.gather(*(ask(base, prompt, max_tokens=12) for prompt in prompts))
    alone = [await ask(base, prompt, max_tokens=12) for prompt in prompts[:4]]
    assert together[:4] == alone
    assert len({text for text, _reason, _lane in together}) > 8


async def test_bursts_of_one_lane_onto_the_other_are_exclusive_and_right(base: str) -> None:
    """A serial request in mid-generation, then a burst for the batch, and the reverse."""
    expected = {question: (await ask(base, question))[0] for question in QUESTIONS[:4]}
    serial = asyncio.create_task(ask(base, QUESTIONS[0], **SERIAL))
    while (await model_status(base))["running"]["serial"] == 0:  # noqa: ASYNC110  # not our process
        await asyncio.sleep(0.01)
    burst = await asyncio.gather(*(ask(base, question) for question in QUESTIONS[:4]))
    reverse = await asyncio.gather(
        *(ask(base, question) for question in QUESTIONS[:3]), ask(base, QUESTIONS[3], **SERIAL)
    )
    assert (await serial)[0] == expected[QUESTIONS[0]]
    assert [text for text, _reason, _lane in burst] == list(expected.values())
    assert [text for text, _reason, _lane in reverse] == list(expected.values())


@LANES
async def test_the_limit_ends_in_the_same_place_streamed_or_not(
    base: str, extra: dict[str, Any]
) -> None:
    """`max_tokens: 5` gives five tokens and `length`."""
    whole, reason, _lane = await ask(base, "Count to ten.", max_tokens=5, **extra)
    assert reason == "length"
    assert await streamed(base, "Count to ten.", max_tokens=5, **extra) == (whole, "length")
    assert (await ask(base, "Count to ten.", max_tokens=5))[0] == whole


@LANES
async def test_a_stop_string_gives_the_same_text_everywhere(
    base: str, extra: dict[str, Any]
) -> None:
    """Nothing of the stop is sent, on both lanes and both endpoints, streamed or not."""
    full, _reason, _lane = await ask(base, QUESTIONS[0])
    stop = full[10:16]
    expected = full[: full.index(stop)]
    assert (await ask(base, QUESTIONS[0], stop=[stop], **extra))[:2] == (expected, "stop")
    assert await streamed(base, QUESTIONS[0], stop=[stop], **extra) == (expected, "stop")


async def test_a_prompt_that_came_before_is_not_computed_again(base: str) -> None:
    """Three times in a row and four at once: the same text, at most all but one token cached."""
    async with client(base) as openai:

        async def again() -> tuple[str | None, int, int]:
            answer = await openai.completions.create(
                model="default",
                prompt="The quick brown fox jumps over the lazy dog. " * 4,
                temperature=0,
                max_tokens=5,
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            return answer.choices[0].text, cached or 0, usage.prompt_tokens

        row = [await again() for _ in range(3)]
        together = await asyncio.gather(*(again() for _ in range(4)))
    assert len({text for text, _cached, _tokens in [*row, *together]}) == 1
    assert row[0][1] == 0
    assert all(0 < cached < tokens for _text, cached, tokens in [*row[1:], *together])


@LANES
async def test_emoji_and_accents_stream_without_replacement_characters(
    base: str, extra: dict[str, Any]
) -> None:
    """The joined deltas equal the whole text, also in a batch of eight."""
    content = "repeat: 😀 ďábelské 日本語"
    count = 1 if extra else 8
    parts = await asyncio.gather(
        *(streamed(base, content, max_tokens=30, **extra) for _ in range(count))
    )
    whole, _reason, _lane = await ask(base, content, max_tokens=30, **extra)
    assert {text for text, _reason in parts} == {whole}
    assert "\ufffd" not in whole


async def test_a_seed_gives_one_text_and_seeds_differ(base: str) -> None:
    """In both lanes the same draws; other requests beside it do not matter."""
    fields = {"temperature": 0.8, "top_k": 50, "max_tokens": 16}
    alone = await ask(base, "Tell me a story.", seed=1, **fields)
    busy = await asyncio.gather(
        ask(base, "Tell me a story.", seed=1, **fields),
        *(ask(base, "Tell me a story.", seed=seed, **fields) for seed in range(2, 6)),
    )
    assert busy[0] == alone
    assert len({text for text, _reason, _lane in busy}) > 3
    serial = await ask(base, "Tell me a story.", seed=1, **fields, **SERIAL)
    assert serial[0] == alone[0]


async def test_top_k_of_one_equals_greedy_on_both_lanes(base: str) -> None:
    """Whatever the temperature."""
    greedy = (await ask(base, QUESTIONS[4]))[0]
    for extra in ({}, SERIAL):
        hot = await ask(base, QUESTIONS[4], temperature=1.5, top_k=1, **extra)
        assert hot[0] == greedy


async def test_rows_with_penalties_keep_their_own_beside_others(base: str) -> None:
    """All in one batch: each equals itself in the serial lane, and differs from the plain text."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.9},
        {"presence_penalty": 2.0, "presence_context_size": 100},
        {"frequency_penalty": 1.5},
        {"temperature": 0.8, "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"temperature": 0.7, "seed": 4, "top_p": 0.95, "frequency_penalty": 0.5},
    ]
    question = "Write one line about rain."
    together = await asyncio.gather(*(ask(base, question, **kind) for kind in kinds))
    assert {lane for _text, _reason, lane in together} == {"batch"}
    for kind, (text, _reason, _lane) in zip(kinds, together, strict=True):
        assert text == (await ask(base, question, **kind, **SERIAL))[0], kind
    assert len({text for text, _reason, _lane in together}) == len(kinds)


@LANES
async def test_logprobs_have_one_entry_per_token_and_the_choice_among_the_best(
    base: str, extra: dict[str, Any]
) -> None:
    """Greedy: the chosen token is the most likely one."""
    async with client(base) as openai:
        answer = await openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            temperature=0,
            logprobs=True,
            top_logprobs=5,
            **extra,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


@LANES
async def test_an_answer_in_a_schema_is_a_document_of_it(base: str, extra: dict[str, Any]) -> None:
    """Beside rows without one, whose text stays what it is; streamed and not, both the same."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    structured = {"response_format": form, "max_tokens": 64, **extra}
    expected = (await ask(base, QUESTIONS[1]))[0]
    document, plain = await asyncio.gather(
        ask(base, QUESTIONS[0], **structured), ask(base, QUESTIONS[1])
    )
    assert plain[0] == expected
    assert document[1:] == ("stop", "serial" if extra else "batch")
    assert set(json.loads(document[0])) == {"city", "sure"}
    assert await streamed(base, QUESTIONS[0], **structured) == document[:2]
    cut = await ask(base, QUESTIONS[0], **{**structured, "max_tokens": 3})
    assert cut[1] == "length"
    assert document[0].startswith(cut[0])


async def test_clients_that_leave_free_the_model_for_the_next(base: str) -> None:
    """Forty clients leave after a few chunks or before the headers; four new ones run at once."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Write a long story."}],
        "max_tokens": 400,
        "stream": True,
    }

    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        extra = SERIAL if number % 8 == 0 else {}
        request = session.post(f"{base}/v1/chat/completions", json={**body, **extra})
        try:
            async with asyncio.timeout(0.2 + number * 0.05), request as answer:
                async for _chunk in answer.content:
                    pass
        except TimeoutError:
            pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(leave(session, number) for number in range(40)))
    answers = await asyncio.gather(*(ask(base, QUESTIONS[0]) for _ in range(4)))
    assert all("Paris" in text for text, _reason, _lane in answers)
    model = await model_status(base)
    assert model["running"] == {"batch": 0, "serial": 0}
    assert model["waiting"] == {"batch": 0, "serial": 0}


async def test_a_long_prompt_joins_running_streams_and_both_finish(base: str) -> None:
    """Its prefill is cut into chunks between the others' steps."""
    expected = (await ask(base, QUESTIONS[1], max_tokens=40))[0]
    long = "word " * 700 + "What is the capital of France?"
    running = asyncio.create_task(ask(base, QUESTIONS[1], max_tokens=40))
    joined = await ask(base, long, max_tokens=4)
    assert (await running)[0] == expected
    assert joined[:2] == (await ask(base, long, max_tokens=4, **SERIAL))[:2]
