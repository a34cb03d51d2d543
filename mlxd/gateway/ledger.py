"""What became of each request, counted once."""

from __future__ import annotations

import asyncio
import math

from mlxd.gateway.endings import Ending
from mlxd.gateway.ticket import Ticket
from mlxd.metrics import NO_LANE
from mlxd.metrics.model import ModelMetrics
from mlxd.metrics.vllm import Life
from mlxd.policy import Reject, Take
from mlxd.wire import Finished, Lane, Step

#: Weight of the newest request in the running mean of service times.
NEWEST = 0.1
LONGEST_RETRY = 60  # seconds; a place may open long before the whole line has moved


class Ledger:
    """The accounts of one model. Its gateway tells it each fact when it happens."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._service: float | None = None  # mean seconds that a request holds its row

    def decided(self, answer: Take | Reject) -> None:
        """The policy chose."""
        match answer:
            case Take(lane, reason):
                self._metrics.decided(lane, reason)
            case Reject(trait):
                self._metrics.decided(NO_LANE, trait)

    def rejected(self) -> None:
        """A request was refused; it never had a ticket."""
        self._metrics.rejected()

    def started(self, ticket: Ticket, now: float) -> None:
        """The request got its row, perhaps its second."""
        if ticket.times.started is None:
            self._metrics.started(ticket.lane, now - ticket.times.accepted)
        ticket.times.started = now
        if ticket.lane is Lane.BATCH:
            self._metrics.looked_up(len(ticket.generation.prompt), ticket.cached_tokens)

    def token(self, ticket: Ticket, now: float) -> None:
        """The engine gave one token before the request's end."""
        times = ticket.times
        if times.last_token is None:
            times.first_token = now
            self._metrics.first_token(ticket.lane, now - times.accepted)
        else:
            self._metrics.next_token(ticket.lane, now - times.last_token)
        times.last_token = now

    def replayed(self) -> None:
        """A request runs again: the engine that had it died before it gave a token."""
        self._metrics.replayed()

    def preempted(self) -> None:
        """A row gave way to older ones where memory was short."""
        self._metrics.preempted()

    def restarted(self) -> None:
        """Another engine is started in the place of one that died."""
        self._metrics.restarted()

    def confirmed(self, ticket: Ticket, tokens: int) -> None:
        """These tokens count as usage, whatever comes."""
        self._metrics.generated(ticket.lane, tokens)

    def stepped(self, frame: Step) -> None:
        """The engine finished an iteration."""
        self._metrics.stepped(frame.seconds, frame.rows)

    def finished(self, ticket: Ticket, frame: Finished) -> None:
        """The engine's account of the request came, before or after its consumer left."""
        if ticket.times.started is not None:
            held = asyncio.get_running_loop().time() - ticket.times.started
            mean = held if self._service is None else self._service
            self._service = mean + NEWEST * (held - mean)
            self._metrics.prefilled(
                ticket.lane,
                computed=frame.prefilled_tokens,
                cached=frame.cached_tokens,
                # A row that was given up before its first token has no whole prefill to time.
                seconds=frame.prefill_seconds if frame.generated_tokens else None,
            )
        if ticket.left and ticket.ending is not None:
            self._discard(frame, ticket.ending)

    def settled(self, ticket: Ticket, ending: Ending) -> None:
        """The consumer left: the end is final."""
        seconds = asyncio.get_running_loop().time() - ticket.times.accepted
        life = Life(
            seconds=seconds,
            timings=ticket.times.spans,
            prompt_tokens=len(ticket.generation.prompt),
            completion_tokens=ending.completion_tokens,
            max_tokens=ticket.generation.max_tokens,
        )
        self._metrics.ended(ticket.lane, ending.outcome, life)
        self._metrics.generated(ticket.lane, max(ending.completion_tokens - ticket.confirmed, 0))
        if ticket.finished is not None:
            self._discard(ticket.finished, ending)

    def retry_after(self, queued: int, abreast: int) -> int:
        """Seconds until a line of this length has moved up, as far as is known.

        Args:
            abreast: requests that are served at the same time.
        """
        if self._service is None:
            return 1
        return max(1, min(LONGEST_RETRY, math.ceil(self._service * queued / abreast)))

    def _discard(self, frame: Finished, ending: Ending) -> None:
        past_the_end = max(frame.generated_tokens - ending.completion_tokens, 0)
        self._metrics.discarded(past_the_end + frame.discarded_tokens)
