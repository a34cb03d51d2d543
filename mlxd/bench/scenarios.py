"""What is done to a server, and what is measured of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mlxd.bench import prompts
from mlxd.bench.figures import Figures, Metric, largest_gap, of_window
from mlxd.bench.load import Answer, Client, Request, RequestFailed, closed_loop, together
from mlxd.bench.servers import NOTHING, Needs

#: The most likely token, always.
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
#: Words of the prompt that joins running streams.
LONG_WORDS = 2500


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a scenario is run, and with which prompts and settings."""

    requests: int  # of each client of a closed loop, the first not counted
    seed: int


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that each send one request after the other."""

    about: str
    clients: int
    sampling: Callable[[Random], Mapping[str, Any]]
    max_tokens: int = 48
    needs: Needs = NOTHING
    servers: Sequence[str] = ()  # those that can do it; empty = all

    def scripts(self, amount: Amount) -> list[list[Request]]:
        """Each client's requests; equal for equal seeds."""
        random = Random(amount.seed)  # noqa: S311 - repeatable, not secret
        return [
            [
                Request(
                    prompts.chat_prompt(random, number=client * amount.requests + index + 1),
                    self.max_tokens,
                    self.sampling(random),
                )
                for index in range(amount.requests)
            ]
            for client in range(self.clients)
        ]

    async def run(self, client: Client, amount: Amount) -> Figures:
        """One run, its first round not counted.

        Raises:
            RequestFailed: a request failed.
        """
        return of_window(await closed_loop(client.ask, self.scripts(amount)))


@dataclass(frozen=True, slots=True)
class LongJoin:
    """Running streams that a long prompt joins."""

    about: str
    streams: int = 4
    stream_tokens: int = 200
    long_words: int = LONG_WORDS
    long_tokens: int = 16
    #: Deltas that every stream has had when the long prompt is sent.
    running_from: int = 8
    needs: Needs = NOTHING
    servers: Sequence[str] = ()

    async def run(self, client: Client, amount: Amount) -> Figures:
        """One run: after a short warm-up, one long request.

        Raises:
            RequestFailed: a request failed, or the streams were too short to show anything.
        """
        random = Random(amount.seed)  # noqa: S311 - repeatable, not secret
        texts = [prompts.chat_prompt(random, number) for number in range(1, 2 * self.streams + 1)]
        warm_up, counted = texts[: self.streams], texts[self.streams :]
        await together([client.ask(self._request(text, 8)) for text in warm_up])
        long = self._request(prompts.long_prompt(random, self.long_words), self.long_tokens)
        streams = [self._request(text, self.stream_tokens) for text in counted]
        answers, joined = await running_streams(client, streams, long, self.running_from)
        if joined.ttft is None:
            raise RequestFailed("the long prompt got no text")
        try:
            stall = largest_gap(answers, joined.sent)
        except ValueError as error:
            raise RequestFailed(f"before the long prompt was sent, {error}") from error
        return {Metric.LARGEST_GAP: stall, Metric.LONG_TTFT: joined.ttft}

    def _request(self, text: str, max_tokens: int) -> Request:
        return Request(text, max_tokens, GREEDY)


async def running_streams(
    client: Client, streams: Sequence[Request], joining: Request, running_from: int
) -> tuple[list[Answer], Answer]:
    """Start the streams, and send one more request when each has had so many texts.

    Raises:
        RequestFailed: any of them failed.
    """
    running = [_Running(running_from) for _ in streams]

    async def stream(request: Request, state: _Running) -> Answer:
        try:
            return await client.ask(request, state.on_text)
        finally:
            state.reached.set()  # nobody need wait for one that has ended

    async def join() -> Answer:
        for state in running:
            await state.reached.wait()
        return await client.ask(joining)

    *answers, joined = await together([*map(stream, streams, running), join()])
    return answers, joined


class _Running:
    """Tells when a stream has had so many deltas."""

    def __init__(self, deltas: int) -> None:
        self._left = deltas
        self.reached = asyncio.Event()

    def on_text(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.reached.set()


MIXED = ClosedLoop(
    "16 clients, each request with its own temperature, top_p and top_k", 16, prompts.mixed
)
PLAIN: Mapping[str, ClosedLoop | LongJoin] = {
    "mixed": MIXED,
    "mixed-open": ClosedLoop("the same with no top_k", 16, prompts.mixed_open),
    "wide": ClosedLoop("16 clients, temperature 0.7, top_p 0.95, no top_k", 16, prompts.wide),
    "penalties": ClosedLoop(
        "the first with penalties and a logit_bias of its own", 16, prompts.penalised
    ),
    "greedy": ClosedLoop("16 clients, temperature 0", 16, prompts.greedy),
    "single": ClosedLoop("one client, temperature 0", 1, prompts.greedy),
    "crowd": ClosedLoop("64 clients on 16 rows, temperature 0", 64, prompts.greedy),
    "long-join": LongJoin(f"a prompt of {LONG_WORDS:,} words joins four running streams"),
}
