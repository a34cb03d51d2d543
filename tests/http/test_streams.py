"""Streams over real sockets: when headers go out, silence, failures, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import aiohttp
import pytest
import structlog

from mlxd.config import ServerSettings
from mlxd.errors import EngineFailed, TimedOut
from mlxd.serving import Generation
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Say:", "stream": True}


class Gate:
    """A script that gives tokens, waits to be opened, then ends or raises."""

    def __init__(self, *tokens: int, error: Exception | None = None) -> None:
        self.tokens = tokens
        self.error = error
        self.open = asyncio.Event()

    async def __call__(self, _: Generation) -> AsyncGenerator[list[int], None]:
        """Play it."""
        for token in self.tokens:
            yield [token]
        await self.open.wait()
        if self.error is not None:
            raise self.error


async def events(response: aiohttp.ClientResponse) -> list[str]:
    """What follows `data:`, to the end of the stream."""
    text = (await response.read()).decode()
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data")]


async def test_keepalives_go_by_the_clock_while_a_request_waits(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """Headers and comments before the first token; the answer follows."""
    gate = Gate()
    gateway = FakeGateway(gate)
    quick = ServerSettings(sse_keepalive=0.01)
    async with (
        serving(directory(tokenizer, gateway), quick) as url,
        http.post(f"{url}/v1/completions", json=BODY) as response,
    ):
        assert response.status == 200
        assert response.headers["x-mlxd-lane"] == "batch"
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": keepalive\n\n"
        gate.open.set()
        assert (await events(response))[-1] == "[DONE]"


async def test_keepalives_can_be_switched_off(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """Then headers wait for the first event."""
    gate = Gate()
    gateway = FakeGateway(gate)
    async with serving(directory(tokenizer, gateway), ServerSettings(sse_keepalive=None)) as url:
        asked = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=BODY))
        await gateway.admitted.wait()
        gate.open.set()
        async with await asked as response:
            assert b"keepalive" not in await response.read()


async def test_a_failure_before_the_first_event_is_a_status(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """A stream whose headers are not out fails as a whole answer does."""
    gate = Gate(error=TimedOut("it waited too long", retry_after=1))
    gate.open.set()
    async with (
        serving(directory(tokenizer, FakeGateway(gate))) as url,
        http.post(f"{url}/v1/completions", json=BODY) as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "request_timeout"


async def test_a_failure_after_three_tokens_is_one_error_event_then_the_end(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """The same code and type as the status would have had."""
    gate = Gate(*await tokenizer.encode("a b c"), error=EngineFailed("the step failed"))
    gate.open.set()
    async with serving(directory(tokenizer, FakeGateway(gate))) as url:
        async with http.post(f"{url}/v1/completions", json=BODY) as response:
            *texts, failure, end = await events(response)
        async with http.post(f"{url}/v1/completions", json=BODY | {"stream": False}) as response:
            assert response.status == 503
            whole = await response.json()
    assert [json.loads(text)["choices"][0]["text"] for text in texts] == ["a", " b", " c"]
    assert json.loads(failure) == whole
    assert whole["error"]["code"] == "engine_failed"
    assert end == "[DONE]"


async def test_a_failure_after_a_keepalive_is_an_error_event(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """The headers are out, so that no status can tell it any more."""
    gate = Gate(error=TimedOut("it waited too long"))
    quick = ServerSettings(sse_keepalive=0.01)
    async with (
        serving(directory(tokenizer, FakeGateway(gate)), quick) as url,
        http.post(f"{url}/v1/completions", json=BODY) as response,
    ):
        gate.open.set()
        failure, end = await events(response)
    assert json.loads(failure)["error"]["code"] == "request_timeout"
    assert end == "[DONE]"


async def test_an_unexpected_failure_in_a_stream_tells_nothing_of_its_insides(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """The log has the traceback, the client an internal error."""
    gate = Gate(*await tokenizer.encode("a"), error=ZeroDivisionError("secret"))
    gate.open.set()
    async with (
        serving(directory(tokenizer, FakeGateway(gate))) as url,
        http.post(f"{url}/v1/completions", json=BODY) as response,
    ):
        failure, end = (await events(response))[-2:]
    assert json.loads(failure)["error"]["code"] == "internal_error"
    assert "secret" not in failure
    assert end == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    tokenizer: Tokenizer, http: aiohttp.ClientSession, stream: bool
) -> None:
    """Streamed or not, while it waits in line."""
    gateway = FakeGateway(Gate())
    async with serving(directory(tokenizer, gateway)) as url:
        asked = asyncio.ensure_future(
            http.post(f"{url}/v1/completions", json=BODY | {"stream": stream})
        )
        await gateway.admitted.wait()
        asked.cancel()
        assert await asyncio.wait_for(gateway.tickets[0].left.wait(), 5)


async def test_a_client_that_leaves_in_mid_stream_ends_its_request(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """At once, not when the next token comes."""
    gateway = FakeGateway(Gate(*await tokenizer.encode("a b c")))
    async with serving(directory(tokenizer, gateway)) as url:
        response = await http.post(f"{url}/v1/completions", json=BODY)
        await response.content.readuntil(b"\n\n")
        response.close()
        assert await asyncio.wait_for(gateway.tickets[0].left.wait(), 5)


class Lines:
    """A structlog processor that keeps lines and says when one came."""

    def __init__(self) -> None:
        self.kept: list[Mapping[str, Any]] = []
        self.news = asyncio.Event()

    def __call__(self, _: object, __: str, line: MutableMapping[str, Any]) -> NoReturn:
        """Keep one line; nothing is printed."""
        self.kept.append(line)
        self.news.set()
        raise structlog.DropEvent


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The log of one test."""
    lines = Lines()
    structlog.configure(processors=[lines])
    yield lines
    structlog.reset_defaults()


async def test_a_reader_that_never_reads_holds_nobody_and_is_cut_off(
    tokenizer: Tokenizer, http: aiohttp.ClientSession, lines: Lines
) -> None:
    """Its row runs to its own end; at the request's ceiling its connection closes."""
    # More than the kernel takes: some 2 kB a token.
    asked = json.dumps(CHAT | {"max_tokens": 5000, "logprobs": True, "top_logprobs": 20}).encode()
    gateway = FakeGateway(says([500] * 5000))
    async with serving(directory(tokenizer, gateway), ServerSettings(request_timeout=1.0)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(HEAD % len(asked) + asked)
            await asyncio.wait_for(gateway.admitted.wait(), 5)
            await asyncio.wait_for(gateway.tickets[0].left.wait(), 20)
            assert gateway.tickets[0].sent == 5000
            async with http.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 2}) as other:
                assert (await events(other))[-1] == "[DONE]"
            lines.news.clear()
            await asyncio.wait_for(lines.news.wait(), 20)
            # As in the metric: its row had come to its own end, only nobody read.
            assert (lines.kept[-1]["outcome"], lines.kept[-1]["status"]) == ("length", None)
