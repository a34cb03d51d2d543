"""Stop strings: find the earliest in a growing text, hold back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """Where a stop string stands in the whole text, in characters."""

    start: int
    end: int
    stop: str


class StopScanner:
    """Passes a text through up to the first stop string.

    The earliest occurrence wins, of several at one place the shortest. A match
    is therefore kept waiting while a longer stop that began before it may still
    complete. The result depends on the text alone, not on how it was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._released = 0
        self.match: Match | None = None

    @property
    def released(self) -> int:
        """Characters let through so far."""
        return self._released

    def push(self, text: str) -> str:
        """Add text; returns what can no longer be part of a stop."""
        if not self._stops:
            self._released += len(text)
            return text
        if self.match is not None:
            return ""
        self._held += text
        found = self._find()
        pending = self._pending(len(self._held) if found is None else found.start)
        if pending is not None:
            return self._release(pending)
        if found is not None:
            return self._settle(found)
        return self._release(len(self._held))

    def finish(self) -> str:
        """The text is over: what is held goes out, up to a match that was waiting."""
        found = None if self.match is not None else self._find()
        return self._release(len(self._held)) if found is None else self._settle(found)

    def _find(self) -> Match | None:
        """The earliest complete stop in the held text, in its characters."""
        places = [
            (start, start + len(stop), stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        return Match(*min(places)) if places else None

    def _pending(self, limit: int) -> int | None:
        """Where, before `limit`, the earliest stop begins that the text only cuts short."""
        longest = max(len(stop) for stop in self._stops)
        for start in range(max(0, len(self._held) - longest + 1), limit):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return None

    def _settle(self, found: Match) -> str:
        text = self._held[: found.start]
        self.match = Match(self._released + found.start, self._released + found.end, found.stop)
        self._released += len(text)
        self._held = ""
        return text

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._released += len(text)
        return text
