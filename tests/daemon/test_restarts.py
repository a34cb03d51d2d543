"""When an engine that died is followed by another; and what it said last."""

from __future__ import annotations

import pytest

from mlxd.host.lastwords import cause
from mlxd.host.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first=1.0, longest=5.0, limit=4, steady=100.0)


def test_delays_double_up_to_the_longest_and_end_at_the_limit():
    """Each death in a row waits longer, and after the limit there is no next engine."""
    restarts = Restarts(POLICY)

    delays = [restarts.died(served=0.0, worked=False) for _ in range(5)]

    assert delays == [1.0, 2.0, 4.0, 5.0, None]


@pytest.mark.parametrize(("served", "worked"), [(0.1, True), (100.0, False)])
def test_an_engine_that_served_ends_the_row(served: float, worked: bool):
    """A finished request, or a long time without a death, makes the next death the first again."""
    restarts = Restarts(POLICY)
    for _ in range(4):
        restarts.died(served=0.0, worked=False)

    assert restarts.died(served=served, worked=worked) == 1.0


CRASH = (
    "libc++abi: terminating due to uncaught exception: [METAL] Insufficient Memory",
    "Fatal Python error: Aborted",
    "Current thread 0x00007f1b (most recent call first):",
    '  File "mlxd/engine/runner.py", line 1 in collect',
    "Extension modules: mlx.core (total: 1)",
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), None),
        (("Traceback (most recent call last):", "ValueError: no"), "ValueError: no"),
        (CRASH, CRASH[0]),
        (CRASH[1:], CRASH[1]),
    ],
)
def test_the_cause_is_the_line_that_says_it(lines: tuple[str, ...], expected: str | None):
    """A crash's dump is for the log: the reason is what stands before it, or its first line."""
    assert cause(lines) == expected
