"""The client of the benchmark, against small servers with real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pytest_aiohttp.plugin import AiohttpServer

from mlxd.bench.load import Answer, Client, Request, RequestFailed, closed_loop

REQUEST = Request("hello", 4, {"temperature": 0.5})


def delta(**fields: str) -> bytes:
    """An event with one choice."""
    return b"data: " + json.dumps({"choices": [{"delta": fields}]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """The event that tells token counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def serve(
    aiohttp_server: AiohttpServer, events: Sequence[bytes], status: int = 200
) -> TestServer:
    """A server that answers every chat with these events, and keeps the bodies it got."""
    app = web.Application()
    bodies: list[Any] = []
    app[BODIES] = bodies

    async def chat(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    app.router.add_post("/v1/chat/completions", chat)
    return await aiohttp_server(app)


BODIES: web.AppKey[list[Any]] = web.AppKey("bodies")


def ticks(*moments: float) -> Callable[[], float]:
    """A clock that shows these moments, one at each look."""
    return iter(moments).__next__


async def ask(server: TestServer, clock: Callable[[], float]) -> Answer:
    """One request."""
    async with aiohttp.ClientSession() as session:
        return await Client(session, str(server.make_url("")).rstrip("/"), "m", clock).ask(REQUEST)


async def test_the_first_text_and_not_the_role_ends_the_time_to_first_token(
    aiohttp_server: AiohttpServer,
) -> None:
    """Roles, empty deltas and keepalives do not count; the gaps are between texts."""
    events = [
        b": keepalive\n\n",
        delta(role="assistant", content=""),
        *(delta(content="a"), delta(content=""), delta(content="b"), delta(reasoning="c")),
        *(delta(), usage(9, 5), DONE),
    ]
    answer = await ask(await serve(aiohttp_server, events), ticks(10.0, 12.5, 13.0, 15.0, 16.0))
    assert answer.ttft == 2.5
    assert answer.gaps == [0.5, 2.0]
    assert answer.ended == 16.0
    assert (answer.prompt_tokens, answer.completion_tokens) == (9, 5)


async def test_texts_are_counted_where_the_server_tells_no_usage(
    aiohttp_server: AiohttpServer,
) -> None:
    """A server without usage is counted by its deltas."""
    server = await serve(aiohttp_server, [delta(content="a"), delta(content="b"), DONE])
    answer = await ask(server, ticks(0, 1, 2, 3))
    assert (answer.prompt_tokens, answer.completion_tokens) == (None, 2)


async def test_an_answer_without_text_has_no_time_to_first_token(
    aiohttp_server: AiohttpServer,
) -> None:
    """An end of sequence at once is a token, but there is no text to wait for."""
    answer = await ask(await serve(aiohttp_server, [usage(9, 1), DONE]), ticks(0, 1))
    assert answer.ttft is None
    assert answer.gaps == []
    assert answer.completion_tokens == 1


async def test_the_request_asks_for_a_stream_with_usage_and_its_own_sampling(
    aiohttp_server: AiohttpServer,
) -> None:
    """Both servers get the same body."""
    server = await serve(aiohttp_server, [DONE])
    await ask(server, ticks(0, 1))
    assert server.app[BODIES] == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
        }
    ]


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ([b'{"error": "queue full"}'], 503, "status 503.*queue full"),
        ([delta(content="a")], 200, "cut short"),
        ([delta(content="a"), b'data: {"error": "engine died"}\n\n', DONE], 200, "engine died"),
        ([b"data: {broken\n\n", DONE], 200, "DecodeError"),
    ],
    ids=["refused", "cut", "error event", "no JSON"],
)
async def test_an_answer_that_is_not_whole_fails(
    aiohttp_server: AiohttpServer, events: list[bytes], status: int, said: str
) -> None:
    """Nothing is measured with a request that failed."""
    server = await serve(aiohttp_server, events, status)
    with pytest.raises(RequestFailed, match=said):
        await ask(server, ticks(0, 1, 2))


async def test_a_server_that_is_not_there_fails_the_request() -> None:
    """A refused connection is a failed request like any other."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(RequestFailed, match="ClientConnectorError"):
            await Client(session, "http://127.0.0.1:1", "m", ticks(0)).ask(REQUEST)


def request(name: str) -> Request:
    """A request that only has a name."""
    return Request(name, 1, {})


class Fake:
    """Answers at once with the answers that it was given, or lets one take its time."""

    def __init__(self, slow: str = "", answers: Iterator[Answer] | None = None) -> None:
        self.log: list[str] = []
        self._slow = slow
        self._answers = answers

    async def ask(self, request: Request) -> Answer:
        self.log.append(f"{request.prompt} begins")
        if request.prompt == self._slow:
            for _ in range(20):  # more turns than all others together need
                await asyncio.sleep(0)
        self.log.append(f"{request.prompt} ends")
        return next(self._answers) if self._answers else Answer(0, [1, 2], 3, 2, None)


async def test_no_client_waits_for_another() -> None:
    """One whose first request was quick sends its second while the slowest still has its first."""
    fake = Fake(slow="b1")
    await closed_loop(fake.ask, [[request("a1"), request("a2")], [request("b1"), request("b2")]])
    assert fake.log.index("a2 begins") < fake.log.index("b1 ends")


async def test_throughput_is_the_counted_tokens_by_the_counted_time() -> None:
    """From the first counted request that is sent to the last end; the first round is left out."""
    answers = [
        Answer(sent=0, deltas=[1, 2], ended=3, completion_tokens=1000, prompt_tokens=9),
        Answer(sent=4, deltas=[5, 6], ended=7, completion_tokens=10, prompt_tokens=9),
        Answer(sent=7, deltas=[8, 9], ended=14, completion_tokens=30, prompt_tokens=9),
    ]
    fake = Fake(answers=iter(answers))
    window = await closed_loop(fake.ask, [[request("1"), request("2"), request("3")]])
    assert window.answers == answers[1:]
    assert window.tokens_per_second == 4.0


async def test_one_failed_request_ends_the_loop() -> None:
    """The other clients are given up, and the failure is what is raised."""
    given_up = []

    async def ask(request: Request) -> Answer:
        if request.prompt == "bad":
            raise RequestFailed("refused")
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(request.prompt)
        raise AssertionError

    with pytest.raises(RequestFailed, match="refused"):
        await closed_loop(ask, [[request("good")] * 2, [request("bad")] * 2])
    assert given_up == ["good"]


@pytest.mark.parametrize("scripts", [[], [[request("only one")]]])
async def test_a_loop_with_nothing_to_count_is_refused(scripts: list[list[Request]]) -> None:
    """The first round does not count, so one request each measures nothing."""
    with pytest.raises(ValueError, match="two requests"):
        await closed_loop(Fake().ask, scripts)
