"""What the benchmark sends, and how the long prompt joins."""

from __future__ import annotations

import asyncio
import time
from random import Random

import aiohttp
import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpServer

from mlxd.bench import prompts
from mlxd.bench.catalogue import SCENARIOS
from mlxd.bench.figures import Figures, Metric
from mlxd.bench.load import Client, RequestFailed
from mlxd.bench.scenarios import Amount, ClosedLoop, LongJoin
from tests.bench.test_load import DONE, delta

AMOUNT = Amount(requests=5, seed=1)
CLOSED = {name: s for name, s in SCENARIOS.items() if isinstance(s, ClosedLoop)}


@pytest.mark.parametrize("scenario", CLOSED.values(), ids=CLOSED)
def test_the_same_seed_sends_the_same_and_another_one_does_not(scenario: ClosedLoop) -> None:
    """Every run and both servers get the same work."""
    scripts = scenario.scripts(AMOUNT)
    assert scripts == scenario.scripts(AMOUNT)
    assert scripts != scenario.scripts(Amount(requests=5, seed=2))
    assert [len(script) for script in scripts] == [5] * scenario.clients


@pytest.mark.parametrize("name", ["mixed", "mixed-open", "penalties"])
def test_every_mixed_request_has_its_own_prompt_and_settings(name: str) -> None:
    """No two of a run are alike, and all are in the ranges that were promised."""
    requests = [request for script in CLOSED[name].scripts(AMOUNT) for request in script]
    assert len({request.prompt for request in requests}) == 80
    assert len({str(request.sampling) for request in requests}) == 80
    for request in requests:
        assert 0.5 <= request.sampling["temperature"] <= 1.2
        assert 0.8 <= request.sampling["top_p"] <= 0.99
        if name == "mixed-open":
            assert "top_k" not in request.sampling
        else:
            assert 20 <= request.sampling["top_k"] <= 60


@pytest.mark.parametrize("name", ["greedy", "single"])
def test_greedy_requests_have_temperature_0_and_different_prompts(name: str) -> None:
    """Nothing but the prompt differs."""
    requests = [request for script in CLOSED[name].scripts(AMOUNT) for request in script]
    assert all(request.sampling == {"temperature": 0.0} for request in requests)
    assert len({request.prompt for request in requests}) == len(requests)


def test_prompts_differ_from_their_first_words_on() -> None:
    """So that a cache of prefixes can hold no more than the template."""
    random = Random(1)  # noqa: S311 - repeatable, not secret
    beginnings = {prompts.chat_prompt(random, number)[:14] for number in range(10, 90)}
    assert len(beginnings) == 80


def test_the_long_prompt_has_as_many_words_as_it_says() -> None:
    """The words of the text, without those that ask for a summary."""
    random = Random(1)  # noqa: S311 - repeatable, not secret
    asked = len(prompts.long_prompt(random, 0).split())
    assert len(prompts.long_prompt(random, 2500).split()) == asked + 2500


class StreamsAndJoin:
    """Streams send 3 texts, then wait for the long prompt, then send one more."""

    def __init__(self, *, streams_wait: bool = True) -> None:
        self.sent_at_join = 0
        self._sent = 0
        self._joined = asyncio.Event()
        self._streams_wait = streams_wait
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self._chat)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        max_tokens = (await request.json())["max_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        if max_tokens == 200:
            await self._stream(response)
        elif max_tokens == 16:
            self.sent_at_join = self._sent
            self._joined.set()
            await response.write(delta(content="long"))
        await response.write(DONE)
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        for _ in range(3):
            self._sent += 1
            await response.write(delta(content="x"))
        if self._streams_wait:
            await self._joined.wait()
            await response.write(delta(content="x"))


async def run_long_join(aiohttp_server: AiohttpServer, fake: StreamsAndJoin) -> Figures:
    """The scenario against a fake, with streams that count as running after 3 texts."""
    server = await aiohttp_server(fake.app)
    async with aiohttp.ClientSession() as session:
        client = Client(session, str(server.make_url("")).rstrip("/"), "m", time.monotonic)
        return await LongJoin("", long_words=10, running_from=3).run(client, AMOUNT)


async def test_the_long_prompt_joins_when_all_four_streams_run(
    aiohttp_server: AiohttpServer,
) -> None:
    """Each has had its texts by then, and its wait for the next one is measured."""
    fake = StreamsAndJoin()
    figures = await run_long_join(aiohttp_server, fake)
    assert fake.sent_at_join == 4 * 3
    assert set(figures) == {Metric.LARGEST_GAP, Metric.LONG_TTFT}
    assert figures[Metric.LARGEST_GAP] > 0


async def test_streams_that_end_before_the_long_prompt_show_nothing(
    aiohttp_server: AiohttpServer,
) -> None:
    """That run fails, and is not taken for one without gaps."""
    fake = StreamsAndJoin(streams_wait=False)
    with pytest.raises(RequestFailed, match="no stream was running"):
        await run_long_join(aiohttp_server, fake)
