"""Lines that repeat are bounded, and none is left out silently."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from mlxd.logs.repetition import TALK, TROUBLE, Repetition


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The filter's."""
    return Clock()


@pytest.fixture
def passes(clock: Clock) -> Callable[..., str | None]:
    """Sends one line through the filter; gives what is written, if anything."""
    repetition = Repetition(clock)

    def send(
        message: object, level: int = logging.WARNING, name: str = "mlxd.host", line: int = 1
    ) -> str | None:
        record = logging.LogRecord(name, level, "file.py", line, message, (), None)
        return record.getMessage() if repetition.filter(record) else None

    return send


def test_a_fault_that_repeats_is_written_a_few_times(passes: Callable[..., str | None]):
    """A model that fails at every step writes a bounded number of lines."""
    written = [line for _ in range(1000) if (line := passes({"event": "step failed"}))]

    assert len(written) == TROUBLE.burst


def test_the_next_line_says_how_many_were_left_out(passes: Callable[..., str | None], clock: Clock):
    """Whether it comes soon or after a long time, and once."""
    for _ in range(int(TROUBLE.burst) + 7):
        passes({"event": "step failed"})
    clock.now += 1 / TROUBLE.per_second
    assert passes({"event": "step failed"}) == str({"event": "step failed", "suppressed": 7})

    clock.now += 3600
    assert passes({"event": "step failed"}) == str({"event": "step failed"})


def test_lines_of_libraries_say_it_in_words(passes: Callable[..., str | None], clock: Clock):
    """They know no fields; what makes them the same is where they were written."""
    for number in range(int(TROUBLE.burst) + 2):
        passes(f"bad thing {number}", name="asyncio", line=7)
    assert passes("bad thing elsewhere", name="asyncio", line=8) is not None
    clock.now += 1 / TROUBLE.per_second

    told = passes("bad thing again", name="asyncio", line=7)
    assert told == "bad thing again (and 2 more like it before)"


def test_one_models_trouble_hides_no_others(passes: Callable[..., str | None]):
    """Each has its own allowance."""
    for _ in range(int(TROUBLE.burst) + 1):
        passes({"event": "model failed", "model": "a"})

    assert passes({"event": "model failed", "model": "b"}) is not None
    assert passes({"event": "model failed", "model": "a"}) is None


def test_talk_may_be_longer(passes: Callable[..., str | None]):
    """A traceback that an engine prints comes through whole."""
    line = {"event": "engine output"}
    written = [passes(line, logging.INFO) for _ in range(int(TALK.burst) + 50)]

    assert sum(text is not None for text in written) == TALK.burst


def test_every_request_has_its_line(passes: Callable[..., str | None]):
    """However many there are."""
    for _ in range(5000):
        assert passes({"event": "request"}, logging.INFO, "mlxd.request") is not None
