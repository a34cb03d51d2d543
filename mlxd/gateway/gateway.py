"""One model's admission, daemon side: who waits, who is in the engine, how each ends.

Everything here runs on the event loop and nothing waits, so that each method
is one transition: a request comes in, the engine says something, an operator
wants something. Only tickets are awaited, by their consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlxd.errors import Draining, ModelNotReady, TimedOut
from mlxd.gateway import endings
from mlxd.gateway.admission import check_memory, check_queue, choose_lane, retry_after
from mlxd.gateway.endings import Ending
from mlxd.gateway.inengine import InEngine, Send, suspected
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.gateway.ticket import Place, Ticket
from mlxd.gateway.waiting import Standing, WaitingLine
from mlxd.holds import Holds
from mlxd.operations import LiveRequests
from mlxd.serving import Generation
from mlxd.wire import (
    BatchTuning,
    Budget,
    Capabilities,
    Finished,
    Held,
    Lane,
    Preempted,
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
#: The same for one that met a model without an engine: it starts, or starts again.
ENGINE_RETRY = 5


class Gateway:
    """Fulfils `serving.Gateway` for one model, over all the engines that it has in its life."""

    def __init__(self, terms: Terms, ledger: Ledger) -> None:
        self._capabilities: Capabilities | None = None
        self._terms = terms
        self._ledger = ledger
        self._line: WaitingLine[Ticket] = WaitingLine()
        self._engine = InEngine()
        self._next_id = 0
        self._open = True
        self._lost: str | None = None
        self._live = Holds()  # requests that have not ended
        self._undelivered = Holds()  # tickets whose consumer has not left
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.kv_bytes = self.prefix_cache_bytes = self.peak_bytes = 0
        self.kv_budget: int | None = None  # bytes; None = not told yet

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
        capabilities = self._check_open()
        take = choose_lane(generation, self._terms, capabilities, self._ledger)
        check_memory(generation, capabilities, self.kv_budget)
        running = [ticket.lane for ticket in self._engine.live()]
        line = [ticket.lane for ticket in self._waiting()]
        check_queue(running, [*line, take.lane], self._terms, self._ledger)
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

    def _check_open(self) -> Capabilities:
        if self._lost is not None:
            raise ModelNotReady(f"the model's engine has failed: {self._lost}")
        if not self._open:
            raise Draining("the model is draining", retry_after=DRAIN_RETRY)
        if self._capabilities is None or not self._engine.attached:
            raise ModelNotReady("the model's engine is starting", retry_after=ENGINE_RETRY)
        return self._capabilities

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

    def attach(self, capabilities: Capabilities, loaded: BatchTuning, send: Send) -> None:
        """An engine is ready: it gets what waits.

        Args:
            capabilities: those of the engine before, if there was one: what waits was
                checked against them.
            loaded: the settings that it was started with; others may be in force by now.
            send: hands a frame to it without blocking.
        """
        self._capabilities = capabilities
        self._engine.attach(send)
        if self.kv_budget is not None:
            self._engine.tell(Budget(self.kv_budget))
        if loaded != self._terms.tuning:
            self._engine.tell(Retune(self._terms.tuning))
        self._hand_out()

    def detach(self, reason: str) -> None:
        """The engine is gone, and another will come.

        What had no token yet goes back to the head of the line, in its order, and runs
        again. What had one ends with an error, and so does what was run again before:
        it may be what ends engines.
        """
        had = self._engine.detach()
        self.kv_bytes = self.prefix_cache_bytes = 0
        suspects = suspected(had)
        again = []
        for ticket in had:
            if ticket.ending is not None:
                continue
            if ticket.received or (ticket in suspects and ticket.replayed):
                self._end(ticket, endings.lost(reason, ticket.received))
                continue
            if ticket in suspects:
                ticket.replayed = True
                self._ledger.replayed()
            ticket.place = Place.WAITING
            again.append(ticket)
        self._line.put_back(again)

    def lost(self, reason: str) -> None:
        """The engine is gone for good: everything accepted ends with an error.

        Args:
            reason: for clients; nothing of this machine is in it.
        """
        self._lost = reason
        accepted = [*self._line, *self._engine.detach()]
        self.kv_bytes = self.prefix_cache_bytes = 0
        for ticket in accepted:
            self._end(ticket, endings.lost(reason, ticket.received))

    def started(self, frame: Started) -> None:
        """A request left the engine's line. Raises ProtocolError for an unknown id."""
        ticket = self._engine.find(frame.id)
        ticket.place = Place.RUNNING
        ticket.cached_tokens = frame.cached_tokens
        self._ledger.started(ticket, asyncio.get_running_loop().time())
        self._hand_out()

    def preempted(self, frame: Preempted) -> None:
        """A row gave way to older ones, and will go on. Raises ProtocolError for an unknown id."""
        self._engine.find(frame.id)
        self._ledger.preempted()

    def stepped(self, frame: Step) -> None:
        """One iteration. Raises ProtocolError for an unknown id."""
        self.peak_bytes = frame.peak_bytes
        self.kv_bytes = frame.kv_bytes
        self.prefix_cache_bytes = frame.prefix_bytes
        self._ledger.stepped(frame)
        now = asyncio.get_running_loop().time()
        for token in frame.tokens:
            ticket = self._engine.find(token.id)
            if ticket.ending is None:
                self._ledger.token(ticket, now)
                ticket.deliver(token)

    def held(self, frame: Held) -> None:
        """What the engine holds has changed while it did nothing."""
        self.kv_bytes = frame.kv_bytes
        self.prefix_cache_bytes = frame.prefix_bytes

    def finished(self, frame: Finished) -> None:
        """A request's row is free. Raises ProtocolError for an unknown id."""
        ticket = self._engine.remove(frame.id)
        ticket.finished = frame
        self._end(ticket, endings.of_row(frame))
        self._ledger.finished(ticket, frame)
        self._hand_out()

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
            self._engine.tell(Retune(terms.tuning))
        self._hand_out()

    def allow(self, kv_bytes: int) -> None:
        """How much KV the engine may hold from now on."""
        if kv_bytes != self.kv_budget:
            self.kv_budget = kv_bytes
            self._engine.tell(Budget(kv_bytes))

    def cut(self) -> None:
        """The drain's deadline: what runs ends with what it has, what waits or comes fails."""
        self.close()
        # The line first: else each row that ends would hand out one more of it.
        for ticket in [*self._line, *self._engine]:
            error = Draining("the drain's deadline came", retry_after=DRAIN_RETRY)
            self._end(ticket, endings.drained(ticket.received, runs=ticket.runs, error=error))

    def tell(self, frame: ToEngine) -> None:
        """Have the engine do something that no request asks for, if there is one."""
        self._engine.tell(frame)

    def requests(self) -> list[Ticket]:
        """Those that have not ended, in the order of their turns."""
        return [t for t in (*self._engine, *self._line) if t.ending is None]

    def withdraw(self, request_id: str) -> int:
        """End the requests of this id, by an operator's word; returns how many."""
        found = [t for t in self.requests() if t.generation.request_id == request_id]
        for ticket in found:
            self._end(ticket, endings.withdrawn(ticket.received))
        return len(found)

    async def idle(self) -> None:
        """Wait until every accepted request has ended."""
        await self._live.none()

    async def delivered(self) -> None:
        """Wait until every consumer has left its ticket."""
        await self._undelivered.none()

    def engine_has(self) -> int:
        """Requests that the engine has not finished."""
        return len(self._engine)

    def running(self, lane: Lane) -> int:
        """Requests that hold a row, those that were cancelled and still leave it included."""
        return self._engine.running(lane)

    def waiting(self, lane: Lane) -> int:
        """Accepted requests that hold no row yet."""
        return sum(ticket.lane is lane for ticket in self._waiting())

    def live(self) -> LiveRequests:
        """What has not ended; a row that was given up and still leaves the engine has."""
        return LiveRequests(running=len(self._engine.live()), waiting=len(self._waiting()))

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
        elif ticket in self._engine:
            self._engine.give_up(ticket)
        ticket.close(ending)
        self._timers.pop(ticket.id).cancel()
        self._live.release()
        self._hand_out()
        return ending

    def _waiting(self) -> list[Ticket]:
        return [*self._engine.waiting(), *self._line]

    def _hand_out(self) -> None:
        if not self._engine.attached:
            return
        running = self._engine.running()
        room = max(self._terms.batch.width - running, 0) + LOOKAHEAD
        for _ in range(min(room - (len(self._engine) - running), len(self._line))):
            self._engine.take(self._line.pop())

    def _expire(self, ticket: Ticket) -> None:
        error = TimedOut(
            f"the request waited longer than {self._terms.request_timeout:g} s",
            retry_after=retry_after(ticket.lane, len(self._line), self._terms, self._ledger),
        )
        self._end(ticket, endings.timed_out(ticket.received, runs=ticket.runs, error=error))
