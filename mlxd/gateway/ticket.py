"""One admitted request, as its consumer sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from mlxd.gateway.endings import Ending
from mlxd.policy import Take
from mlxd.serving import Generation, Outcome, Timings
from mlxd.wire import Finished, Submit, Token


class Place(Enum):
    """Where a request is."""

    WAITING = auto()  # in the gateway's line
    SENT = auto()  # in the engine's line
    RUNNING = auto()  # it holds a row


@dataclass(slots=True)
class Times:
    """Moments on the event loop's clock, in seconds."""

    accepted: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def spans(self) -> Timings:
        """How long each part took, as far as it came."""
        return Timings(
            admitted=self.accepted,
            queue=_between(self.accepted, self.started),
            prefill=_between(self.started, self.first_token),
            decode=_between(self.first_token, self.last_token),
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Desk(Protocol):
    """What a ticket asks of its gateway."""

    def end(self, ticket: Ticket, ending: Ending) -> None:
        """The consumer found the end; the row is given up if it still runs."""

    def confirm(self, ticket: Ticket, tokens: int) -> None:
        """This many more tokens were taken without finding an end in them."""


class Ticket:
    """An async iterator of token batches; fulfils `serving.Ticket`.

    The gateway is the only writer of where it stands and how it ends; the
    consumer reads. Tokens that are not read yet are kept: there are never more
    than the request's own limit.
    """

    def __init__(
        self, number: int, generation: Generation, take: Take, now: float, desk: Desk
    ) -> None:
        self.id = number
        self.generation = generation
        self.lane = take.lane
        self.reason = take.reason
        self.place = Place.WAITING
        self.times = Times(accepted=now)
        self.cached_tokens = 0  # of the prompt, from the engine's prefix cache
        self.received = 0  # tokens that the engine sent before the end
        self.confirmed = 0  # of those, known not to lie past a stop string
        self.ending: Ending | None = None
        self.finished: Finished | None = None
        self.left = False  # its context has exited
        self.replayed = False  # an engine that died had it, and it runs again
        self._desk = desk
        self._unread: list[Token] = []
        self._handed = 0  # tokens in the batch that the consumer has now
        self._news = asyncio.Event()

    # --- the consumer's side

    def __aiter__(self) -> AsyncIterator[list[Token]]:
        return self

    async def __anext__(self) -> list[Token]:
        self._confirm_handed()
        while not self._unread and self.ending is None:
            self._news.clear()
            await self._news.wait()
        if self._unread:
            batch, self._unread = self._unread, []
            self._handed = len(batch)
            return batch
        if self.ending is not None and self.ending.error is not None:
            raise self.ending.error
        raise StopAsyncIteration

    def end(self, finish_reason: str, completion_tokens: int) -> None:
        """The text layer found the end (a stop string) at this token count.

        It takes precedence over an end that the engine has already reported:
        at one token a stop string comes before the limit.

        Raises:
            RuntimeError: the context has exited, and the request is accounted for.
        """
        if self.left:
            raise RuntimeError("the request has been settled")
        self._handed = 0
        self._unread.clear()
        self._desk.end(self, Ending(finish_reason, finish_reason, completion_tokens))

    @property
    def outcome(self) -> Outcome:
        """The end. Raises RuntimeError while the request runs."""
        # Unread text may still hold a stop string, until nobody can read it any more.
        if self.ending is None or (self._unread and not self.left):
            raise RuntimeError("the request has not ended yet")
        return Outcome(
            name=self.ending.outcome,
            finish_reason=self.ending.finish_reason,
            prompt_tokens=len(self.generation.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.ending.completion_tokens,
            timings=self.times.spans,
        )

    # --- the gateway's side

    @property
    def runs(self) -> bool:
        """Whether it holds, or held, a row."""
        return self.place is Place.RUNNING

    def submission(self) -> Submit:
        """The request as the engine gets it."""
        return Submit(
            id=self.id,
            lane=self.lane,
            prompt=list(self.generation.prompt),
            max_tokens=self.generation.max_tokens,
            eos=sorted(self.generation.eos),
            sampling=self.generation.sampling,
        )

    def deliver(self, token: Token) -> None:
        """One more token from the engine."""
        self.received += 1
        self._unread.append(token)
        self._news.set()

    def close(self, ending: Ending) -> None:
        """Set the end; what is still unread is read first."""
        self.ending = ending
        self._news.set()

    def _confirm_handed(self) -> None:
        if self._handed:
            self._desk.confirm(self, self._handed)
            self._handed = 0
