"""The waiting order and the counts that a drain waits for."""

from __future__ import annotations

import asyncio

import pytest

from mlxd.gateway.waiting import WaitingLine, startable
from mlxd.holds import Holds
from mlxd.wire import Lane

B, S = Lane.BATCH, Lane.SERIAL


def test_line_keeps_arrival_order_when_some_leave():
    """Whoever leaves from the middle changes nothing for the others."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcd":
        line.push(name)
    line.remove("b")

    assert [line.pop(), line.pop(), line.pop()] == ["a", "c", "d"]
    assert len(line) == 0


def test_leaving_a_line_twice_is_a_fault():
    """A place cannot be given up by someone who has none."""
    line: WaitingLine[str] = WaitingLine()

    with pytest.raises(KeyError):
        line.remove("a")


@pytest.mark.parametrize(
    ("running", "line", "rows", "expected"),
    [
        ([], [B, B, B], 2, 2),
        ([B], [B, B], 2, 1),
        ([B, B], [B], 2, 0),
        ([], [S, B], 4, 1),
        ([], [B, S, B], 4, 1),
        ([B], [S], 4, 0),
        ([S], [B, B], 4, 0),
        ([], [], 4, 0),
        ([B, B, B], [B], 2, 0),  # the width was reduced
    ],
)
def test_startable_is_what_the_lanes_allow(
    running: list[Lane], line: list[Lane], rows: int, expected: int
):
    """Batch requests run together, a serial one alone, and nobody overtakes."""
    assert startable(running, line, rows) == expected


async def test_holds_wait_for_the_last_release():
    """A drain is over when everything that was taken is back."""
    holds = Holds()
    holds.take()
    holds.take()
    waiter = asyncio.create_task(holds.none())
    holds.release()
    await asyncio.sleep(0)
    assert not waiter.done()
    holds.release()

    await asyncio.wait_for(waiter, 1)


def test_releasing_too_often_is_loud():
    """A hold that is released twice would let a drain end too early."""
    with pytest.raises(RuntimeError):
        Holds().release()
