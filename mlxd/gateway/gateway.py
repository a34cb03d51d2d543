"""One model's admission, daemon side: who waits, who is in the engine, how each ends.

Everything here runs on the event loop and nothing waits, so that each method
is one transition: a request comes in, the engine says something, an operator
wants something. Only tickets are awaited, by their consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mlxd.errors import BadRequest, Draining, ModelNotReady, QueueFull, TimedOut
from mlxd.gateway import endings
from mlxd.gateway.endings import Ending
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.gateway.ticket import Place, Ticket
from mlxd.gateway.waiting import Standing, WaitingLine, startable
from mlxd.holds import Holds
from mlxd.operations import LiveRequests
from mlxd.policy import Reject, Take, decide
from mlxd.serving import Generation
from mlxd.wire import (
    Cancel,
    Capabilities,
    Finished,
    Lane,
    Retune,
    Started,
    Step,
    ToEngine,
)

#: Requests that the engine holds beyond its free rows, so that a row that ends
#: is followed at once. More would take the order out of this gateway's hands.
LOOKAHEAD = 2
#: Seconds after which a client that met a drain may ask again.
DRAIN_RETRY = 5


class ProtocolError(Exception):
    """The engine said something that cannot be; it must not be trusted further."""


class Gateway:
    """Fulfils `serving.Gateway` for one engine, from its readiness to its end."""

    def __init__(
        self,
        capabilities: Capabilities,
        terms: Terms,
        send: Callable[[ToEngine], None],
        ledger: Ledger,
    ) -> None:
        """
        Args:
            send: hands a frame to the engine without blocking.
        """
        self._capabilities = capabilities
        self._terms = terms
        self._send = send
        self._ledger = ledger
        self._line: WaitingLine[Ticket] = WaitingLine()
        self._rows: dict[int, Ticket] = {}  # sent and not `Finished`, by id, in the engine's order
        self._next_id = 0
        self._open = True
        self._lost: str | None = None
        self._live = Holds()  # requests that have not ended
        self._undelivered = Holds()  # tickets whose consumer has not left
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.kv_bytes = self.prefix_cache_bytes = 0

    # --- a request

    @asynccontextmanager
    async def admit(self, generation: Generation) -> AsyncIterator[Ticket]:
        """See `serving.Gateway`; the place is given back when the context exits."""
        ticket = self._accept(generation)
        try:
            self._hand_out()
            yield ticket
        except Exception:
            self._end(ticket, endings.failed("its answer could not be made", ticket.received))
            raise
        finally:
            self._leave(ticket)

    def _accept(self, generation: Generation) -> Ticket:
        self._check_open()
        take = self._choose_lane(generation)
        self._check_queue(take.lane)
        loop = asyncio.get_running_loop()
        ticket = Ticket(self._next_id, generation, take, loop.time(), self)
        self._next_id += 1
        self._timers[ticket.id] = loop.call_later(self._terms.request_timeout, self._expire, ticket)
        self._live.take()
        self._undelivered.take()
        caller = generation.caller
        standing = Standing(caller.name, caller.weight, generation.priority)
        self._line.push(ticket, standing)
        return ticket

    def _check_open(self) -> None:
        if self._lost is not None:
            raise ModelNotReady(f"the model's engine has failed: {self._lost}")
        if not self._open:
            raise Draining("the model is draining", retry_after=DRAIN_RETRY)

    def _choose_lane(self, generation: Generation) -> Take:
        answer = decide(
            generation.traits, self._terms.policy, self._terms.batch.width, self._capabilities
        )
        self._ledger.decided(answer)
        if isinstance(answer, Reject):
            raise BadRequest(
                f"this model's policy rejects requests with the trait {answer.trait!r}",
                param=answer.trait,
                code="rejected_by_policy",
            )
        return answer

    def _check_queue(self, lane: Lane) -> None:
        running = [
            ticket.lane for ticket in self._rows.values() if ticket.runs and ticket.ending is None
        ]
        line = [ticket.lane for ticket in self._waiting()] + [lane]
        queued = len(line) - startable(running, line, self._terms.batch.width)
        if queued > self._terms.batch.queue:
            raise QueueFull(
                f"{queued - 1} requests wait already; the limit is {self._terms.batch.queue}",
                retry_after=self._retry_after(lane, queued),
            )

    def _leave(self, ticket: Ticket) -> None:
        ending = self._end(ticket, endings.cancelled(ticket.received))
        ticket.left = True
        self._undelivered.release()
        self._ledger.settled(ticket, ending)

    # --- the ticket's desk

    def end(self, ticket: Ticket, ending: Ending) -> None:
        """The consumer found the end; this counts, whatever the engine has said."""
        if self._end(ticket, ending) is not ending:
            ticket.close(ending)

    def confirm(self, ticket: Ticket, tokens: int) -> None:
        """Count tokens as usage once no stop string was found in them."""
        ticket.confirmed += tokens
        self._ledger.confirmed(ticket, tokens)

    # --- the engine's word

    def started(self, frame: Started) -> None:
        """A request left the engine's line. Raises ProtocolError for an unknown id."""
        ticket = self._row(frame.id)
        ticket.place = Place.RUNNING
        ticket.cached_tokens = frame.cached_tokens
        self._ledger.started(ticket, asyncio.get_running_loop().time())
        self._hand_out()

    def stepped(self, frame: Step) -> None:
        """One iteration. Raises ProtocolError for an unknown id."""
        self.kv_bytes = frame.kv_bytes
        self.prefix_cache_bytes = frame.prefix_bytes
        self._ledger.stepped(frame)
        now = asyncio.get_running_loop().time()
        for token in frame.tokens:
            ticket = self._row(token.id)
            if ticket.ending is None:
                self._ledger.token(ticket, now)
                ticket.deliver(token)

    def finished(self, frame: Finished) -> None:
        """A request's row is free. Raises ProtocolError for an unknown id."""
        ticket = self._row(frame.id)
        del self._rows[frame.id]
        ticket.finished = frame
        self._end(ticket, endings.of_row(frame))
        self._ledger.finished(ticket, frame)
        self._hand_out()

    def lost(self, reason: str) -> None:
        """The engine is gone: everything accepted ends with an error."""
        self._lost = reason
        accepted = self._accepted()
        self._rows.clear()
        self.kv_bytes = self.prefix_cache_bytes = 0
        for ticket in accepted:
            message = f"the model's engine failed: {reason}"
            self._end(ticket, endings.failed(message, ticket.received))

    # --- the operator's word

    def close(self) -> None:
        """Admit nothing from now on; what was accepted goes on."""
        self._open = False

    def reopen(self) -> None:
        """Admit again."""
        self._open = True

    def retune(self, terms: Terms) -> None:
        """Serve under other settings; what runs or waits is not touched."""
        tuning = self._terms.tuning
        self._terms = terms
        if terms.tuning != tuning:
            self._send(Retune(terms.tuning))
        self._hand_out()

    def cut(self) -> None:
        """The drain's deadline: what runs ends with what it has, what waits or comes fails."""
        self.close()
        for ticket in self._accepted():
            error = Draining("the drain's deadline came", retry_after=DRAIN_RETRY)
            self._end(ticket, endings.drained(ticket.received, runs=ticket.runs, error=error))

    async def idle(self) -> None:
        """Wait until every accepted request has ended."""
        await self._live.none()

    async def delivered(self) -> None:
        """Wait until every consumer has left its ticket."""
        await self._undelivered.none()

    def running(self, lane: Lane) -> int:
        """Requests that hold a row, those that were cancelled and still leave it included."""
        return sum(ticket.runs and ticket.lane is lane for ticket in self._rows.values())

    def waiting(self, lane: Lane) -> int:
        """Accepted requests that hold no row yet."""
        return sum(ticket.lane is lane for ticket in self._waiting())

    def live(self) -> LiveRequests:
        """What has not ended; a row that was given up and still leaves the engine has."""
        return LiveRequests(
            running=sum(ticket.runs and ticket.ending is None for ticket in self._rows.values()),
            waiting=len(self._waiting()),
        )

    # --- inside

    def _end(self, ticket: Ticket, ending: Ending) -> Ending:
        """End a request wherever it stands and give up what it holds; the first end counts.

        Returns:
            The ending that counts.
        """
        if ticket.ending is not None:
            return ticket.ending
        if ticket.place is Place.WAITING:
            self._line.remove(ticket)
        elif ticket.id in self._rows:
            self._send(Cancel(ticket.id))
        ticket.close(ending)
        self._timers.pop(ticket.id).cancel()
        self._live.release()
        self._hand_out()
        return ending

    def _waiting(self) -> list[Ticket]:
        in_engine = [
            ticket
            for ticket in self._rows.values()
            if ticket.place is Place.SENT and ticket.ending is None
        ]
        return [*in_engine, *self._line]

    def _hand_out(self) -> None:
        if self._lost is not None:
            return
        running = sum(ticket.runs for ticket in self._rows.values())
        room = max(self._terms.batch.width - running, 0) + LOOKAHEAD
        for _ in range(min(room - (len(self._rows) - running), len(self._line))):
            ticket = self._line.pop()
            ticket.place = Place.SENT
            self._send(ticket.submission())
            self._rows[ticket.id] = ticket

    def _retry_after(self, lane: Lane, queued: int) -> int:
        abreast = self._terms.batch.width if lane is Lane.BATCH else 1
        return self._ledger.retry_after(queued, abreast)

    def _row(self, number: int) -> Ticket:
        try:
            return self._rows[number]
        except KeyError:
            message = f"the engine named request {number}, which it does not hold"
            raise ProtocolError(message) from None

    def _accepted(self) -> list[Ticket]:
        # The line first: else each row that ends would hand out one more of it.
        return [*self._line, *self._rows.values()]

    def _expire(self, ticket: Ticket) -> None:
        error = TimedOut(
            f"the request waited longer than {self._terms.request_timeout:g} s",
            retry_after=self._retry_after(ticket.lane, len(self._line)),
        )
        self._end(ticket, endings.timed_out(ticket.received, runs=ticket.runs, error=error))
