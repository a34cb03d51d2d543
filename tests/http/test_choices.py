"""Several answers to one request, and prompts that come back: `n`, `best_of`, `echo`, `suffix`."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxd.errors import EngineFailed
from mlxd.serving import Generation
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving

ASK: Any = [{"role": "user", "content": "hi"}]
WORDS = [" zero", " one", " two", " three"]


class Numbered:
    """A script that says its answer's own number, as told by the order of admission.

    With `together`, so many answers each say a first piece before any says its second.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers: dict[str, int] = {}
        self.together = asyncio.Barrier(1)

    def __call__(self, generation: Generation) -> AsyncGenerator[list[int], None]:
        """Play it."""
        number = self._numbers.setdefault(generation.request_id, len(self._numbers))
        return self._say(f"I am{WORDS[number % len(WORDS)]}.")

    async def _say(self, text: str) -> AsyncGenerator[list[int], None]:
        first, *others = await self._tokenizer.encode(text)
        yield [first]
        await self.together.wait()
        for token in others:
            yield [token]
            await asyncio.sleep(0)  # the other answers' turn


@pytest.fixture
def script(tokenizer: Tokenizer) -> Numbered:
    """What the fake model says."""
    return Numbered(tokenizer)


@pytest.fixture
def gateway(script: Numbered) -> FakeGateway:
    """Each answer says which it is."""
    return FakeGateway(script)


@pytest.fixture
async def client(tokenizer: Tokenizer, gateway: FakeGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client in front of the fake model."""
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_n_answers_have_their_own_index_text_and_reason(client: openai.AsyncOpenAI) -> None:
    """Usage counts the prompt once, and every answer."""
    answer = await client.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["I am zero.", "I am one.", "I am two."]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    one = await client.chat.completions.create(model=MODEL, messages=ASK)
    assert answer.usage is not None
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens


async def test_n_streamed_answers_come_side_by_side(
    client: openai.AsyncOpenAI, script: Numbered
) -> None:
    """Each with a role and a reason of its own; one end, one usage."""
    script.together = asyncio.Barrier(3)
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASK, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts: defaultdict[int, str] = defaultdict(str)
    roles, reasons, order, usages = [], [], [], []
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
            roles += [choice.index] if choice.delta.role else []
            reasons += [choice.index] if choice.finish_reason else []
    assert dict(texts) == {0: "I am zero.", 1: "I am one.", 2: "I am two."}
    assert sorted(roles) == sorted(reasons) == [0, 1, 2]
    assert order != sorted(order)
    assert len(usages) == 1


async def test_each_answer_has_a_random_stream_of_its_own_told_by_the_seed(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """The first is that of a request for one."""
    await client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=-1)
    await client.chat.completions.create(model=MODEL, messages=ASK, seed=-1)
    seeds = [ticket.generation.sampling.seed for ticket in gateway.tickets]
    assert seeds == [2**64 - 1, 0, 1, 2**64 - 1]


async def test_several_prompts_are_answered_in_their_order(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    """`n` to each, those of one prompt side by side; every prompt counts."""
    answer = await client.completions.create(model=MODEL, prompt=["a", "b c"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [list(ticket.generation.prompt) for ticket in gateway.tickets]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompts[0]) + len(prompts[2])


async def test_one_failed_answer_fails_the_request(
    tokenizer: Tokenizer,
) -> None:
    """The others are given up: half an answer is none."""
    first = True

    async def script(_: Generation) -> AsyncGenerator[list[int], None]:
        nonlocal first
        if first:
            first = False
            raise EngineFailed("the step failed")
        yield [500]
        await asyncio.Event().wait()

    gateway = FakeGateway(script)
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt="a", n=2)
        assert caught.value.code == "engine_failed"
        for ticket in gateway.tickets:
            await asyncio.wait_for(ticket.left.wait(), 5)


async def test_the_best_of_several_are_shown(
    tokenizer: Tokenizer, gateway: FakeGateway, client: openai.AsyncOpenAI
) -> None:
    """By the mean of their tokens' log-probabilities; all of them count as usage."""
    gateway.logprob = lambda ticket: -1.0 / (1 + gateway.tickets.index(ticket))
    answer = await client.completions.create(model=MODEL, prompt="a", n=2, best_of=4)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "I am three."), (1, "I am two.")]
    assert answer.choices[0].logprobs is None
    assert len(gateway.tickets) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 4 * len(await tokenizer.encode("I am one."))
    shown = await client.completions.create(model=MODEL, prompt="a", best_of=2, logprobs=0)
    assert shown.choices[0].logprobs is not None


async def test_an_echo_puts_the_prompt_before_each_answer(client: openai.AsyncOpenAI) -> None:
    """Text as it came, tokens as their text; streamed or not."""
    answer = await client.completions.create(model=MODEL, prompt="Who? ", echo=True, n=2)
    assert [c.text for c in answer.choices] == ["Who? I am zero.", "Who? I am one."]
    ids = await client.completions.create(model=MODEL, prompt=[504, 2], echo=True)
    assert ids.choices[0].text == "The<|im_end|>I am two."
    stream = await client.completions.create(model=MODEL, prompt="Who? ", echo=True, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == "Who? I am three."


async def test_a_suffix_needs_a_model_that_fills_gaps(client: openai.AsyncOpenAI) -> None:
    """The starter does not."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="def f(", suffix=": pass")
    assert (caught.value.param, caught.value.code) == ("suffix", "suffix_not_supported")


async def test_a_gap_is_put_between_the_models_own_tokens(
    starter_path: Path, tmp_path: Path
) -> None:
    """Prefix, suffix, then the place where the answer begins."""
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(starter_path / name, tmp_path / name)
    content = (tmp_path / "tokenizer.json").read_text()
    family = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    for old, new in zip(["<repo_name>", "<reponame>", "<file_sep>"], family, strict=True):
        content = content.replace(json.dumps(old), json.dumps(new))
    (tmp_path / "tokenizer.json").write_text(content)
    tokenizer = await Tokenizer.load(tmp_path, trust_remote_code=False)
    gateway = FakeGateway(says([500]))
    async with (
        serving(directory(tokenizer, gateway)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await client.completions.create(model=MODEL, prompt="def f(", suffix=": pass")
    text = await tokenizer.decode(list(gateway.generation.prompt))
    assert text == "<fim_prefix>def f(<fim_suffix>: pass<fim_middle>"
    tokenizer.close()
