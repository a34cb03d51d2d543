"""Telling an engine that hangs from one that is busy, by what it said that it may take."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlxd.wire import Phase, ToDaemon


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """What an engine may take where it has not said so itself. Seconds."""

    start: float = 120.0  # from its exec to its first phase
    answer: float = 60.0  # an idle one that is handed work, until it says that it works
    # A daemon that was held up itself first reads what has come meanwhile.
    confirm: float = 1.0


class Timers(Protocol):
    """What an event loop has."""

    def time(self) -> float:
        """Seconds of its clock."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back at this time of its clock."""


class Watchdog:
    """Compares the time since an engine's last progress with the budget of its phase.

    It never asks the engine for anything. A phase that is announced again with nothing done
    in between is no progress: an engine that spins is as dead as one that is stuck.
    """

    def __init__(
        self,
        hung: Callable[[str], None],
        timers: Timers,
        policy: WatchPolicy,
        *,
        requests: Callable[[], int],
    ) -> None:
        """
        Args:
            hung: called once, with what is wrong.
            requests: how many the engine has that have not finished.
        """
        self._hung = hung
        self._timers = timers
        self._policy = policy
        self._requests = requests
        self._phase = Phase("start", policy.start)
        self._progress = False  # since the phase was announced
        self._due: float | None = None
        self._doubted = False
        self._timer: TimerHandle | None = None
        self._expect(policy.start)

    def heard(self, frame: ToDaemon) -> None:
        """The engine said something."""
        if not isinstance(frame, Phase):
            if self._phase.budget is not None:
                self._expect(self._phase.budget)
            self._progress = True
            return
        before, self._phase = self._phase, frame
        if frame.budget is None:
            self._expect(self._policy.answer if self._requests() else None)
        elif self._progress or (frame.name, frame.done) != (before.name, before.done):
            self._expect(frame.budget)
        self._progress = False

    def handed(self) -> None:
        """The engine got work; an idle one has to say that it has begun."""
        if self._due is None:
            self._expect(self._policy.answer)

    def stop(self) -> None:
        """Watch no longer."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect(self, seconds: float | None) -> None:
        """Progress is due in so many seconds; None = nothing is."""
        self._doubted = False
        self._due = None if seconds is None else self._timers.time() + seconds
        # A timer that rings too early looks again: most phases need no new one.
        if self._due is not None and (self._timer is None or self._due < self._timer.when()):
            self._set_timer(self._due)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timers.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._due is None:
            return
        now = self._timers.time()
        if now < self._due:
            self._set_timer(self._due)
        elif not self._doubted:
            self._doubted = True
            self._set_timer(now + self._policy.confirm)
        else:
            self.stop()
            self._hung(self._describe())

    def _describe(self) -> str:
        phase = self._phase
        if phase.budget is None:
            return (
                f"it was handed work while idle, and did not begin within {self._policy.answer:g} s"
            )
        return f"no progress in phase {phase.name!r}, which may take {phase.budget:.3g} s"
