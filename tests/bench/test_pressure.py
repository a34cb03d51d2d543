"""What presses on whom in the scenarios, and what is measured of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pytest_aiohttp.plugin import AiohttpServer

from mlxd.bench.catalogue import SCENARIOS, Scenario
from mlxd.bench.figures import Figures, Metric
from mlxd.bench.load import Client, Request, RequestFailed
from mlxd.bench.pressure import CALLERS, Beside, Flood, Repeated
from mlxd.bench.scenarios import GREEDY, Amount
from mlxd.bench.servers import LAUNCHERS
from tests.bench.test_load import DONE, delta

AMOUNT = Amount(requests=2, seed=1)
JOINING = 3  # tokens that tell the joining request from the streams
QUICK, SLOW = 0.005, 0.05


class Fake:
    """A server that answers each chat by a rule of its own, and keeps what it was asked."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.asked: list[dict[str, Any]] = []

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body["key"] = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        await self.answer(body, response)
        await response.write(DONE)
        return response

    async def answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        raise NotImplementedError

    async def run(self, aiohttp_server: AiohttpServer, scenario: Scenario) -> Figures:
        """One run of a scenario against it."""
        server = await aiohttp_server(self.app)
        async with aiohttp.ClientSession() as session:
            client = Client(session, str(server.make_url("")).rstrip("/"), "m", time.monotonic)
            return await scenario.run(client, AMOUNT)


class SlowedByOne(Fake):
    """Texts come quickly until another request is in prefill beside them; its prefill is slow
    beside others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0
        self.prefilling = False

    async def answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        if body["max_tokens"] == JOINING:
            self.prefilling = True
            await asyncio.sleep(6 * SLOW if self.streams else 3 * SLOW)
            self.prefilling = False
            for _ in range(JOINING):
                await response.write(delta(content="x"))
                await asyncio.sleep(QUICK)
            return
        self.streams += 1
        for _ in range(body["max_tokens"]):
            await response.write(delta(content="x"))
            await asyncio.sleep(SLOW if self.prefilling else QUICK)
        self.streams -= 1


async def test_gaps_beside_a_prefill_are_told_from_quiet_ones(
    aiohttp_server: AiohttpServer,
) -> None:
    """And so is the speed of that prefill from what it is alone."""
    scenario = Beside("", lambda _: Request("long", JOINING, GREEDY), 2, stream_tokens=60)
    figures = await SlowedByOne().run(aiohttp_server, scenario)
    assert figures[Metric.QUIET_GAP_P50] < SLOW <= figures[Metric.BESIDE_GAP_P50]
    assert figures[Metric.BESIDE_GAP_P99] >= figures[Metric.BESIDE_GAP_P50]
    assert 0.3 < figures[Metric.PREFILL_SHARE] < 0.8
    factor = figures[Metric.BESIDE_GAP_P99] / figures[Metric.QUIET_GAP_P99]
    assert figures[Metric.GAP_FACTOR] == factor


async def test_gaps_beside_a_row_that_decodes_leave_its_prefill_out(
    aiohttp_server: AiohttpServer,
) -> None:
    """What a long row costs the others in every step is another thing than its joining."""
    scenario = Beside(
        "", lambda _: Request("long", JOINING, GREEDY), 2, stream_tokens=60, prefill=False
    )
    figures = await SlowedByOne().run(aiohttp_server, scenario)
    assert figures[Metric.BESIDE_GAP_P50] < SLOW


async def test_streams_that_end_before_the_request_joins_show_nothing(
    aiohttp_server: AiohttpServer,
) -> None:
    """That run fails."""
    scenario = Beside("", lambda _: Request("long", JOINING, GREEDY), 2, stream_tokens=6)
    with pytest.raises(RequestFailed, match="no stream was running"):
        await SlowedByOne().run(aiohttp_server, scenario)


class Remembers(Fake):
    """What begins with a message that came before is quick."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    async def answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        first = body["messages"][0]["content"]
        await asyncio.sleep(QUICK if first in self.known else 4 * SLOW)
        self.known.add(first)
        await response.write(delta(content=f"answer {len(self.asked)}"))


@pytest.mark.parametrize("turns", [False, True])
async def test_requests_that_begin_alike_are_told_from_a_cold_one(
    aiohttp_server: AiohttpServer,
    turns: bool,
) -> None:
    """Questions under one system prompt, and the turns of one conversation."""
    fake = Remembers()
    figures = await fake.run(aiohttp_server, Repeated("", turns=turns, requests=4))
    assert figures[Metric.WARM_TTFT] < 2 * SLOW < figures[Metric.COLD_TTFT]
    assert figures[Metric.WARM_SHARE] < 0.5
    counted = [body["messages"] for body in fake.asked[1:]]
    if not turns:
        assert len({messages[0]["content"] for messages in counted}) == 1
        assert counted[0][0]["role"] == "system"
        assert len({messages[-1]["content"] for messages in counted}) == 4
        return
    *conversation, cold = counted
    assert [len(messages) for messages in conversation] == [1, 3, 5, 7]
    last = conversation[-1]
    assert last[:5] == conversation[-2]
    assert last[5] == {"role": "assistant", "content": "answer 4"}
    assert cold[1:] == last[1:]
    assert cold[0] != last[0]


class OneAtATime(Fake):
    """One request at a time: the calm caller's next, then in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[bool, int]] = []
        self.turn = asyncio.Condition()

    async def answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        place = (body["key"] != CALLERS[0], len(self.asked))
        self.waiting.append(place)
        async with self.turn:
            await self.turn.wait_for(lambda: min(self.waiting) == place)
            await response.write(delta(content="x"))
            await asyncio.sleep(QUICK)
            self.waiting.remove(place)
            self.turn.notify_all()


async def test_a_flood_is_asked_beside_with_a_key_of_ones_own_and_with_its_own(
    aiohttp_server: AiohttpServer,
) -> None:
    """The first overtakes it where order is fair; the second waits behind all of it."""
    fake = OneAtATime()
    figures = await fake.run(aiohttp_server, Flood("", flood=8, asks=2))
    assert figures[Metric.IDLE_TTFT] < figures[Metric.ARRIVAL_TTFT]
    assert figures[Metric.FAIR_TTFT] < figures[Metric.ARRIVAL_TTFT] / 2
    assert QUICK <= figures[Metric.LEAVE_GAP] < figures[Metric.ARRIVAL_TTFT]
    assert {body["key"] for body in fake.asked} == set(CALLERS)


def test_scenarios_name_servers_that_there_are() -> None:
    """Those that only mlxd can do are not asked of another."""
    for scenario in SCENARIOS.values():
        assert set(scenario.servers) <= set(LAUNCHERS)
    assert list(SCENARIOS["grammar"].servers) == ["mlxd"]
