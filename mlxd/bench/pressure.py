"""Scenarios in which some requests press on others: what those feel of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from random import Random
from typing import Any

from mlxd.bench import prompts
from mlxd.bench.figures import Figures, Metric, percentile
from mlxd.bench.load import Answer, Client, Request, RequestFailed, Turn, together
from mlxd.bench.scenarios import GREEDY, Amount, running_streams
from mlxd.bench.servers import NOTHING, Needs

#: Words of the system prompt that all share, about 2,000 tokens.
SYSTEM_WORDS = 1850
#: Who asks now and then, and who floods.
CALLERS = ("calm-key", "flood-key")
KEYED = Needs(keys=CALLERS)
#: Words of a row of about 6,000 tokens.
LONG_ROW_WORDS = 5500


@dataclass(frozen=True, slots=True)
class Beside:
    """Running streams that one more request joins: their gaps before it and beside it.

    The same request alone, before the streams begin, tells what its prefill takes when nothing
    runs beside it.
    """

    about: str
    joining: Callable[[Random], Request]  # two calls give prompts that share nothing
    streams: int = 4
    stream_tokens: int = 160
    #: Gaps count that end in its prefill, or those in its decoding.
    prefill: bool = True
    needs: Needs = NOTHING
    servers: Sequence[str] = ()  # those that can do it; empty = all
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)

    async def run(self, client: Client, amount: Amount) -> Figures:
        """One run.

        Raises:
            RequestFailed: a request failed, or the streams were too short to show anything.
        """
        random = Random(amount.seed)  # noqa: S311 - repeatable, not secret
        texts = [prompts.chat_prompt(random, number) for number in range(1, 2 * self.streams + 1)]
        warm_up, counted = texts[: self.streams], texts[self.streams :]
        await together([client.ask(Request(text, 8, self.sampling)) for text in warm_up])
        alone = await client.ask(self.joining(random))
        streams = [Request(text, self.stream_tokens, self.sampling) for text in counted]
        answers, joined = await running_streams(
            client, streams, self.joining(random), self.stream_tokens // 3
        )
        if joined.ttft is None or alone.ttft is None:
            raise RequestFailed("the joining request got no text")
        first = joined.sent + joined.ttft
        since, until = (joined.sent, first) if self.prefill else (first, joined.ended)
        quiet = _gaps(answers, 0.0, joined.sent)
        beside = _gaps(answers, since, until)
        if not quiet or not beside:
            raise RequestFailed("no stream was running beside the request that joined")
        share = 0.99 if self.prefill else 0.50
        return {
            Metric.QUIET_GAP_P50: percentile(quiet, 0.50),
            Metric.QUIET_GAP_P99: percentile(quiet, 0.99),
            Metric.BESIDE_GAP_P50: percentile(beside, 0.50),
            Metric.BESIDE_GAP_P99: percentile(beside, 0.99),
            Metric.GAP_FACTOR: percentile(beside, share) / percentile(quiet, share),
            Metric.PREFILL_SHARE: alone.ttft / joined.ttft,
        }


def _gaps(answers: Sequence[Answer], since: float, until: float) -> list[float]:
    """Waits between two texts of a stream that ended within this time, each stream's first ones
    left out: others were joining then."""
    return [
        late - early
        for answer in answers
        for early, late in zip(answer.deltas[4:], answer.deltas[5:], strict=False)
        if since < late <= until
    ]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Requests that begin as an earlier one did: first tokens cold and warm.

    With `turns`, each goes on from the answer before; without, each asks another question under
    one long system prompt.
    """

    about: str
    turns: bool
    requests: int = 10
    max_tokens: int = 16
    needs: Needs = NOTHING
    servers: Sequence[str] = ()

    async def run(self, client: Client, amount: Amount) -> Figures:
        """One run; what has been warmed up shares nothing with what is counted.

        Raises:
            RequestFailed: a request failed or had no text.
        """
        random = Random(amount.seed)  # noqa: S311 - repeatable, not secret
        await client.ask(Request(prompts.chat_prompt(random, 0), 8, GREEDY))
        return await (self._conversation if self.turns else self._questions)(client, random)

    async def _questions(self, client: Client, random: Random) -> Figures:
        system = Turn("system", prompts.long_prompt(random, SYSTEM_WORDS))
        ttfts = []
        for number in range(1, self.requests + 1):
            text = prompts.chat_prompt(random, number)
            ttfts.append(_ttft(await client.ask(Request(text, self.max_tokens, GREEDY, [system]))))
        return _reuse(ttfts[0], statistics.median(ttfts[1:]))

    async def _conversation(self, client: Client, random: Random) -> Figures:
        before: list[Turn] = []
        ttft = 0.0
        request = Request("", self.max_tokens, GREEDY)
        for number in range(1, self.requests + 1):
            text = prompts.chat_prompt(random, number)
            request = Request(text, self.max_tokens, GREEDY, tuple(before))
            answer = await client.ask(request)
            ttft = _ttft(answer)
            before += [Turn("user", text), Turn("assistant", answer.text)]
        # As long, and other than all before from its first words on.
        first = Turn("user", f"Something else. {request.before[0].content}")
        cold = await client.ask(replace(request, before=[first, *request.before[1:]]))
        return _reuse(_ttft(cold), ttft)


def _ttft(answer: Answer) -> float:
    if answer.ttft is None:
        raise RequestFailed("a request got no text")
    return answer.ttft


def _reuse(cold: float, warm: float) -> Figures:
    return {Metric.COLD_TTFT: cold, Metric.WARM_TTFT: warm, Metric.WARM_SHARE: warm / cold}


@dataclass(frozen=True, slots=True)
class Flood:
    """One caller that keeps the line full while another asks now and then.

    The other asks alone first, then with a key of its own beside the flood, then with the flood's
    own key, which is plain arrival order.
    """

    about: str
    flood: int = 48  # requests of the flood that wait or run at any one time
    asks: int = 5  # of the other, in each of the three phases
    most_tokens: int = 72  # of an answer; a third at least, so that rows leave one by one
    needs: Needs = KEYED
    servers: Sequence[str] = ("mlxd",)

    async def run(self, client: Client, amount: Amount) -> Figures:
        """One run.

        Raises:
            RequestFailed: a request failed.
        """
        random = Random(amount.seed)  # noqa: S311 - repeatable, not secret
        numbers = count(1)
        calm, flooder = CALLERS

        async def ask(key: str) -> Answer:
            text = prompts.chat_prompt(random, next(numbers))
            tokens = random.randint(self.most_tokens // 3, self.most_tokens)
            return await client.ask(Request(text, tokens, GREEDY, key=key))

        async def ask_often(key: str) -> float:
            return percentile([_ttft(await ask(key)) for _ in range(self.asks)], 0.50)

        ends: list[float] = []

        async def flooding() -> None:
            while True:
                ends.append((await ask(flooder)).ended)

        await ask_often(calm)
        idle = await ask_often(calm)
        flood = [asyncio.ensure_future(flooding()) for _ in range(self.flood)]
        try:
            began = time.monotonic()
            while len(ends) < self.flood:  # the line is as long as it gets
                await asyncio.wait(flood, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
                _raise_failed(flood)
            fair = await ask_often(calm)
            arrival = await ask_often(flooder)
            _raise_failed(flood)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)
        leaves = sorted(end for end in ends if end >= began)
        gaps = [late - early for early, late in pairwise(leaves)]
        return {
            Metric.IDLE_TTFT: idle,
            Metric.FAIR_TTFT: fair,
            Metric.ARRIVAL_TTFT: arrival,
            Metric.LEAVE_GAP: percentile(gaps, 0.50),
        }


def _raise_failed(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _long(random: Random) -> Request:
    return Request(prompts.long_prompt(random, 1500), 4, GREEDY)


def _long_row(random: Random) -> Request:
    return Request(prompts.long_prompt(random, LONG_ROW_WORDS), 48, GREEDY)


def _structured(random: Random) -> Request:
    sentence = {"type": "string", "minLength": 150, "maxLength": 200}
    schema = {
        "type": "object",
        "properties": {"summary": sentence},
        "required": ["summary"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    text = prompts.chat_prompt(random, random.randint(100, 999))
    return Request(text, 48, {**GREEDY, "response_format": form})


_JOINS = "a prompt of 1,500 words joins four running streams"
PRESSURE: Mapping[str, Beside | Repeated | Flood] = {
    "pacing": Beside(_JOINS, _long, stream_tokens=240),
    "pacing-latency": Beside(
        f'{_JOINS}, pacing = "latency"',
        _long,
        stream_tokens=360,
        needs=Needs('pacing = "latency"'),
        servers=("mlxd",),
    ),
    "pacing-throughput": Beside(
        f'{_JOINS}, pacing = "throughput"',
        _long,
        stream_tokens=240,
        needs=Needs('pacing = "throughput"'),
        servers=("mlxd",),
    ),
    "long-row": Beside(
        "a row of 6,000 tokens decodes beside 15 short ones",
        _long_row,
        streams=15,
        stream_tokens=480,
        prefill=False,
    ),
    "grammar": Beside(
        "a row with a grammar decodes beside 15 without",
        _structured,
        streams=15,
        prefill=False,
        servers=("mlxd",),
    ),
    "shared-prompt": Repeated("ten questions under one system prompt of 2,000 tokens", turns=False),
    "conversation": Repeated("a conversation of ten turns", turns=True),
    "flood": Flood("one key floods while another asks now and then"),
}
