"""The client: one streamed chat request at a time, and when each part of its answer came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

#: Fields of a delta that are text; servers name reasoning in two ways.
TEXTS = ("content", "reasoning", "reasoning_content")
#: Seconds without a byte after which a server counts as hung.
SILENCE = 600.0

T = TypeVar("T")


class RequestFailed(Exception):
    """A request that was not answered whole. Nothing measured with it may be quoted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message that stands before a request's own."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One chat request."""

    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]
    before: Sequence[Turn] = ()  # earlier messages
    key: str | None = None  # whose it is, where the server knows keys


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Moments are seconds of the client's clock."""

    sent: float
    deltas: Sequence[float]  # when each delta with text came
    ended: float
    completion_tokens: int  # as the server counts: an end-of-sequence token included
    prompt_tokens: int | None  # None: the server told no usage
    text: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None where there was none."""
        return self.deltas[0] - self.sent if self.deltas else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring deltas."""
        return [late - early for early, late in zip(self.deltas, self.deltas[1:], strict=False)]


class Client:
    """Talks to one server. The clock is read when a request is sent, at each text, at its end."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._clock = clock

    async def ask(self, request: Request, on_text: Callable[[], None] | None = None) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            on_text: called after each delta with text.

        Raises:
            RequestFailed: refused, cut short, or ended by an error.
        """
        try:
            return await self._ask(request, on_text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error

    async def _ask(self, request: Request, on_text: Callable[[], None] | None) -> Answer:
        sent = self._clock()
        deltas: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] | None = None
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE)
        async with self._session.post(
            self._url, json=self._body(request), timeout=timeout, headers=_headers(request)
        ) as response:
            if response.status != 200:
                raise RequestFailed(f"status {response.status}: {(await response.text())[:500]}")
            async for chunk in _chunks(response):
                if "error" in chunk:
                    raise RequestFailed(f"the stream ended with an error: {chunk['error']}")
                usage = chunk.get("usage") or usage
                if text := _text(chunk):
                    texts.append(text)
                    deltas.append(self._clock())
                    if on_text is not None:
                        on_text()
        return Answer(
            sent=sent,
            deltas=deltas,
            ended=self._clock(),
            completion_tokens=len(deltas) if usage is None else int(usage["completion_tokens"]),
            prompt_tokens=None if usage is None else int(usage["prompt_tokens"]),
            text="".join(texts),
        )

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [
                *({"role": turn.role, "content": turn.content} for turn in request.before),
                {"role": "user", "content": request.prompt},
            ],
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **request.sampling,
        }


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Every event's object, up to the end mark."""
    async for line in response.content:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name != b"data":
            continue  # a comment, or the empty line that ends an event
        if value.strip() == b"[DONE]":
            return
        yield msgspec.json.decode(value, type=dict[str, Any])
    raise RequestFailed("the stream was cut short")


def _headers(request: Request) -> Mapping[str, str]:
    return {} if request.key is None else {"authorization": f"Bearer {request.key}"}


def _text(chunk: Mapping[str, Any]) -> str:
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    return "".join(delta.get(name) or "" for delta in deltas for name in TEXTS)


@dataclass(frozen=True, slots=True)
class Window:
    """The counted part of a closed loop: from the first counted request to the last end."""

    began: float
    ended: float
    answers: Sequence[Answer]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of the answers by the window's length."""
        return sum(answer.completion_tokens for answer in self.answers) / (self.ended - self.began)


async def closed_loop(
    ask: Callable[[Request], Awaitable[Answer]], scripts: Sequence[Sequence[Request]]
) -> Window:
    """One client for each script sends its requests one after the other.

    The first request of every script warms up and is not counted. No client waits for another, so
    that requests arrive as the server's own rhythm lets them.

    Raises:
        RequestFailed: any of them failed; the rest are given up.
        ValueError: no client, or one with nothing to count.
    """
    if not scripts or any(len(script) < 2 for script in scripts):
        raise ValueError("every client needs two requests: the first is not counted")

    async def client(script: Sequence[Request]) -> list[Answer]:
        return [await ask(request) for request in script]

    done = await together([client(script) for script in scripts])
    answers = [answer for answered in done for answer in answered[1:]]
    began = min(answer.sent for answer in answers)
    return Window(began, max(answer.ended for answer in answers), answers)


async def together(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """All results in order; the first failure ends the others and is raised alone."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
