"""The requests that the engine has, and the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mlxd.gateway.ticket import Place, Ticket
from mlxd.wire import Cancel, Lane, ToEngine

Send = Callable[[ToEngine], None]


class ProtocolError(Exception):
    """The engine said something that cannot be; it must not be trusted further."""


class InEngine:
    """What was sent to the engine and is not `Finished`, in its order. Owned by the gateway.

    There may be no engine: before the first is ready, and between two.
    """

    def __init__(self) -> None:
        self._send: Send | None = None
        self._rows: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._rows.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket.id in self._rows

    @property
    def attached(self) -> bool:
        """Whether there is an engine."""
        return self._send is not None

    def attach(self, send: Send) -> None:
        """There is an engine now; it has nothing yet.

        Args:
            send: hands a frame to it without blocking.
        """
        self._send = send

    def detach(self) -> list[Ticket]:
        """There is no engine any more; what it had, in its order."""
        self._send = None
        had = [*self._rows.values()]
        self._rows.clear()
        return had

    def tell(self, frame: ToEngine) -> None:
        """Send it a frame; nobody to tell is no error."""
        if self._send is not None:
            self._send(frame)

    def take(self, ticket: Ticket) -> None:
        """Hand a request over."""
        ticket.place = Place.SENT
        self.tell(ticket.submission())
        self._rows[ticket.id] = ticket

    def give_up(self, ticket: Ticket) -> None:
        """Have a request ended; it stays here until the engine says that it has."""
        self.tell(Cancel(ticket.id))

    def find(self, number: int) -> Ticket:
        """The request that the engine speaks of. Raises ProtocolError for an unknown id."""
        try:
            return self._rows[number]
        except KeyError:
            message = f"the engine named request {number}, which it does not hold"
            raise ProtocolError(message) from None

    def remove(self, number: int) -> Ticket:
        """The engine has ended this one. Raises ProtocolError for an unknown id."""
        ticket = self.find(number)
        del self._rows[number]
        return ticket

    def running(self, lane: Lane | None = None) -> int:
        """Requests that hold a row, those that were given up and still leave it included."""
        return sum(t.runs and (lane is None or t.lane is lane) for t in self._rows.values())

    def live(self) -> list[Ticket]:
        """Requests that hold a row and have not ended."""
        return [t for t in self._rows.values() if t.runs and t.ending is None]

    def waiting(self) -> list[Ticket]:
        """Requests in the engine's own line that have not ended."""
        return [t for t in self._rows.values() if t.place is Place.SENT and t.ending is None]


def suspected(had: Sequence[Ticket]) -> set[Ticket]:
    """Of what an engine had when it died, what may have ended it.

    All that it had begun; or, where it had begun nothing, the first: a request is looked at
    before its start is told.
    """
    return {ticket for ticket in had if ticket.runs} or set(had[:1])
