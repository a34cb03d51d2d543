"""What is a hang and what is not, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mlxd.host.watchdog import Watchdog, WatchPolicy
from mlxd.wire import Lane, Phase, Started, Step, ToDaemon

POLICY = WatchPolicy(start=100.0, answer=50.0, confirm=1.0)
TOKEN = Step(Lane.BATCH, 1, 0.1, [], 0)


@dataclass
class Clock:
    """Timers of an event loop whose time stands still between two calls."""

    now: float = 0.0
    handles: list[asyncio.TimerHandle] = field(default_factory=list)
    set_timers: int = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.set_timers += 1
        handle = asyncio.TimerHandle(when, callback, (), asyncio.get_running_loop())
        self.handles.append(handle)
        return handle

    def pass_(self, seconds: float) -> None:
        """Let time pass and ring what is due, in order."""
        end = self.now + seconds
        while due := [h for h in self.handles if not h.cancelled() and h.when() <= end]:
            handle = min(due, key=lambda h: h.when())
            self.handles.remove(handle)
            self.now = max(self.now, handle.when())
            handle._run()  # noqa: SLF001 - what a loop does with it
        self.now = end


@dataclass
class Watch:
    """A watchdog, its clock, and what it found."""

    clock: Clock = field(default_factory=Clock)
    found: list[str] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        self.dog = Watchdog(self.found.append, self.clock, POLICY, requests=lambda: self.requests)

    def hears(self, *frames: ToDaemon) -> None:
        for frame in frames:
            self.dog.heard(frame)


@pytest.fixture
async def watch() -> Watch:
    """An engine that was started just now."""
    return Watch()


async def test_an_engine_that_never_says_anything_hangs(watch: Watch):
    """Its start has a budget, too."""
    watch.clock.pass_(100.5)
    assert watch.found == []
    watch.clock.pass_(1)
    assert watch.found == ["no progress in phase 'start', which may take 100 s"]


async def test_a_hang_is_found_within_twice_the_budget_and_told_once(watch: Watch):
    """In a phase that is shorter than the one before, as well."""
    watch.hears(Phase("load", 1000.0), Phase("step", 5.0))
    watch.clock.pass_(10)
    assert watch.found == ["no progress in phase 'step', which may take 5 s"]
    watch.clock.pass_(10_000)
    assert len(watch.found) == 1


async def test_a_phase_may_take_what_it_said(watch: Watch):
    """A compilation of a minute, or a long chunk of a prompt, is no hang."""
    watch.hears(Phase("warmup", 900.0))
    watch.clock.pass_(60)
    watch.hears(Phase("prefill", 2120.0))
    watch.clock.pass_(2000)
    watch.hears(Phase("step", 120.0), TOKEN, Phase("idle", None))

    assert watch.found == []


async def test_an_idle_engine_may_be_silent_for_ever(watch: Watch):
    """Nobody asks it anything."""
    watch.hears(Phase("idle", None))
    watch.clock.pass_(1_000_000)

    assert watch.found == []
    assert not [handle for handle in watch.clock.handles if not handle.cancelled()]


async def test_an_idle_engine_that_gets_work_has_to_begin(watch: Watch):
    """It was handed a request and does not even say that it works."""
    watch.hears(Phase("idle", None))
    watch.clock.pass_(1000)
    watch.dog.handed()
    watch.clock.pass_(49)
    watch.dog.handed()  # more work is no excuse
    watch.clock.pass_(3)

    assert watch.found == ["it was handed work while idle, and did not begin within 50 s"]


async def test_work_that_crosses_the_word_idle_is_still_due(watch: Watch):
    """The engine said that it is idle just before it got a request."""
    watch.hears(Phase("step", 5.0))
    watch.dog.handed()
    watch.requests = 1
    watch.hears(TOKEN, Phase("idle", None))
    watch.clock.pass_(60)

    assert watch.found == ["it was handed work while idle, and did not begin within 50 s"]


async def test_an_engine_that_spins_is_dead(watch: Watch):
    """The same phase again and again, with nothing done, is no progress."""
    for _ in range(20):
        watch.hears(Phase("step", 5.0))
        watch.clock.pass_(0.5)

    assert watch.found == ["no progress in phase 'step', which may take 5 s"]


@pytest.mark.parametrize("progress", ["tokens", "a start", "prompt tokens"])
async def test_work_that_goes_on_is_no_hang(watch: Watch, progress: str):
    """Tokens, a request that begins, or more of a prompt: each begins the budget anew."""
    for number in range(100):
        watch.hears(Phase("step", 5.0, done=number if progress == "prompt tokens" else 0))
        watch.clock.pass_(0.5)
        if progress != "prompt tokens":
            watch.hears(TOKEN if progress == "tokens" else Started(number))

    assert watch.found == []
    # A timer for every step would cost more than the step's frame.
    assert watch.clock.set_timers < 20


async def test_a_daemon_that_slept_itself_reads_first_what_came_meanwhile(watch: Watch):
    """Frames that wait in the socket are heard after the timer that was due in the sleep."""
    watch.hears(Phase("step", 5.0))
    watch.clock.pass_(5.5)
    watch.hears(TOKEN, Phase("step", 5.0))
    watch.clock.pass_(4)
    watch.hears(TOKEN)

    assert watch.found == []


async def test_an_engine_that_is_sent_away_is_not_watched(watch: Watch):
    """Its end has deadlines of its own."""
    watch.hears(Phase("step", 5.0))
    watch.dog.stop()
    watch.clock.pass_(100)

    assert watch.found == []
