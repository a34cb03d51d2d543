"""The waiting order and the counts that a drain waits for."""

from __future__ import annotations

import asyncio

import pytest

from mlxd.gateway.waiting import Standing, WaitingLine, startable
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


def drained(line: WaitingLine[str]) -> str:
    """Everybody, in the order of their turns."""
    told = list(line)
    taken = [line.pop() for _ in told]
    assert taken == told, "the order that is told is the order that is kept"
    return "".join(taken)


def test_one_busy_caller_cannot_hold_up_another():
    """Turns alternate between callers, whoever has queued more."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcdef":
        line.push(name, Standing("busy"))
    for name in "XY":
        line.push(name, Standing("rare"))

    assert drained(line) == "aXbYcdef"


def test_turns_follow_weights():
    """A caller of weight 3 gets three turns for each one of a caller of weight 1."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcdefgh":
        line.push(name, Standing("heavy", weight=3.0))
    for name in "WXYZ":
        line.push(name, Standing("light"))

    order = drained(line)
    assert [sum(name.isupper() for name in order[:count]) for count in (4, 8)] == [1, 2]


def test_what_is_put_back_had_its_turn():
    """It goes before everybody, in its own order, and costs its caller no other turn."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcd":
        line.push(name, Standing("busy"))
    for name in "XY":
        line.push(name, Standing("rare"))
    taken = [line.pop(), line.pop(), line.pop()]
    line.put_back(taken)
    line.remove(taken[1])

    assert taken == ["a", "X", "b"]
    assert len(line) == 5
    assert drained(line) == "abYcd"


def test_turns_are_not_saved_up():
    """Who was silent while others were served starts with them, not before them."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcd":
        line.push(name, Standing("early"))
    assert [line.pop(), line.pop(), line.pop()] == ["a", "b", "c"]
    for name in "WXYZ":
        line.push(name, Standing("late"))
    for name in "ef":
        line.push(name, Standing("early"))

    assert drained(line) == "WdXYeZf"


def test_a_turn_that_was_given_up_is_not_paid_for():
    """Leaving the line costs a caller nothing."""
    line: WaitingLine[str] = WaitingLine()
    for name in "abcd":
        line.push(name, Standing("one"))
    for name in "WX":
        line.push(name, Standing("other"))
    for name in "abc":
        line.remove(name)

    assert drained(line) == "dWX"


def test_priority_comes_before_fairness():
    """A higher priority is served first, and each turn is paid for."""
    line: WaitingLine[str] = WaitingLine()
    for name in "ab":
        line.push(name, Standing("one"))
    line.push("W", Standing("other"))
    line.push("p", Standing("one", priority=2))

    assert drained(line) == "pWab"


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
