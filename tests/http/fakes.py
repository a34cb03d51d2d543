"""A directory of one model whose tokens are scripted, and a real server in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry

from mlxd.config import ServerSettings
from mlxd.errors import Draining, MlxdError, NotFound
from mlxd.http.app import make_app, make_runner
from mlxd.http.auth import Access
from mlxd.serving import Generation, Identity, Outcome, SamplingDefaults, Served
from mlxd.text.tokenizer import Tokenizer
from mlxd.wire import Capabilities, Lane, Token, TokenLogprobs

MODEL = "starter"
VOCAB = 49152
CONTEXT = 8192
CREATED = 1_700_000_000

#: Yields batches of tokens as an engine would, and may raise.
Script = Callable[[Generation], AsyncGenerator[list[int], None]]


@dataclass
class FakeTicket:
    """Fulfils `serving.Ticket`: plays a script."""

    generation: Generation
    script: Script
    finish: str
    lane: Lane = Lane.BATCH
    reason: str = "none"
    sent: int = 0
    stopped_at: int | None = None
    stopped_by: str = "stop"
    ended: str | None = None  # other than by limit, stop string or end of sequence
    logprob: Callable[[FakeTicket], float] = lambda _: -0.5  # of each of its tokens
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[list[Token]]:
        self.ended = "cancelled"
        async for batch in self._batches():
            allowed = batch[: self.generation.max_tokens - self.sent]
            self.sent += len(allowed)
            yield [self._token(token) for token in allowed]
            if self.stopped_at is not None or self.sent == self.generation.max_tokens:
                break
        self.ended = None

    async def _batches(self) -> AsyncIterator[list[int]]:
        try:
            async for batch in self.script(self.generation):
                yield batch
        except Draining:
            self.ended = "drained"
            raise
        except Exception:
            self.ended = "error"
            raise

    def _token(self, token: int) -> Token:
        wanted = self.generation.sampling.logprobs
        if wanted is None:
            return Token(1, token)
        chosen = self.logprob(self)
        top = [(token + i, chosen - i) for i in range(wanted)]
        return Token(1, token, TokenLogprobs(chosen, top))

    def end(self, finish_reason: str, completion_tokens: int) -> None:
        """The text layer found an end of its own."""
        self.stopped_by = finish_reason
        self.stopped_at = completion_tokens

    @property
    def outcome(self) -> Outcome:
        """How the script, the limit or the stop ended it."""
        if self.ended is not None and self.stopped_at is None:
            return Outcome(self.ended, "length", len(self.generation.prompt), 3, self.sent)
        limited = self.sent == self.generation.max_tokens
        finish = "length" if limited else self.finish
        count = self.sent + (finish == "stop")  # the end of sequence counts too
        if self.stopped_at is not None:
            finish, count = self.stopped_by, self.stopped_at
        return Outcome(
            name=finish,
            finish_reason=finish,
            prompt_tokens=len(self.generation.prompt),
            cached_tokens=3,
            completion_tokens=count,
        )


@dataclass
class FakeGateway:
    """Fulfils `serving.Gateway`: admits everything, or raises `refuse`."""

    script: Script
    finish: str = "stop"
    refuse: MlxdError | None = None
    logprob: Callable[[FakeTicket], float] = lambda _: -0.5
    tickets: list[FakeTicket] = field(default_factory=list)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def admit(self, generation: Generation) -> AsyncIterator[FakeTicket]:
        """Play the script to whoever enters."""
        if self.refuse is not None:
            raise self.refuse
        ticket = FakeTicket(generation, self.script, self.finish, logprob=self.logprob)
        self.tickets.append(ticket)
        self.admitted.set()
        try:
            yield ticket
        finally:
            ticket.left.set()

    @property
    def generation(self) -> Generation:
        """The last one admitted."""
        return self.tickets[-1].generation


@dataclass
class FakeDirectory:
    """Fulfils `serving.Directory`: one model, an alias, and one that is not ready."""

    served: Served
    not_ready: dict[str, MlxdError] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=lambda: {"default": MODEL})
    is_ready: bool = True

    def model_ids(self) -> Sequence[str]:
        """The one that serves first."""
        return [self.served.id, *self.not_ready]

    def identify(self, name: str) -> Identity:
        """By id or as an alias."""
        name = self.aliases.get(name, name)
        if name not in self.model_ids():
            raise NotFound(f"no model {name!r}", param="model", code="model_not_found")
        return Identity(name, CREATED)

    @contextmanager
    def using(self, name: str) -> Iterator[Served]:
        """The one that serves, or the failure of the one that does not."""
        found = self.identify(name).id
        if found in self.not_ready:
            raise self.not_ready[found]
        yield self.served

    def ready(self, name: str | None = None) -> bool:
        """As told by the test, or whether this model serves."""
        if name is None:
            return self.is_ready
        return self.identify(name).id == self.served.id


def directory(
    tokenizer: Tokenizer, gateway: FakeGateway, sampling: SamplingDefaults | None = None
) -> FakeDirectory:
    """The directory of one model in front of this gateway."""
    return FakeDirectory(
        Served(
            id=MODEL,
            capabilities=Capabilities(
                vocab_size=VOCAB,
                context=CONTEXT,
                cache_classes=["KVCache"],
                serial_only=None,
                batchable=[],
                structured=True,
            ),
            tokenizer=tokenizer,
            sampling=sampling or SamplingDefaults(),
            gateway=gateway,
        )
    )


def says(tokens: Sequence[int]) -> Script:
    """A script of these tokens, one at a time."""

    async def script(_: Generation) -> AsyncGenerator[list[int], None]:
        for token in tokens:
            yield [token]

    return script


@asynccontextmanager
async def serving(
    models: FakeDirectory,
    server: ServerSettings | None = None,
    routes: Sequence[web.AbstractRouteDef] = (),
    registry: CollectorRegistry | None = None,
    access: Access | None = None,
) -> AsyncIterator[str]:
    """A real server on a free port; gives its address."""
    settings = server or ServerSettings()
    app = make_app(
        models,
        server=lambda: settings,
        access=lambda: access or Access(),
        registry=registry or CollectorRegistry(),
        extra_routes=routes,
    )
    timeout = settings.receive_timeout
    runner = make_runner(app, shutdown_timeout=1.0, receive_timeout=timeout)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
