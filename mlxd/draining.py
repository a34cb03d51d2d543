"""Letting models finish: with a deadline, and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from mlxd.host import Host

#: Seconds that consumers get to send what a deadline has cut.
FLUSH = 2.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


async def idle_within(hosts: Iterable[Host], seconds: float) -> bool:
    """Wait until everything accepted has ended; returns whether it has."""
    try:
        async with asyncio.timeout(seconds):
            for host in hosts:
                await host.idle()
    except TimeoutError:
        return False
    return True


async def finish(
    hosts: Sequence[Host], drain_timeout: float, delivered: Callable[[], Awaitable[None]]
) -> None:
    """Let everything end by itself until the deadline, then cut it.

    Args:
        delivered: waits until consumers have got everything; they have until the
            same deadline, and a moment after it.
    """
    try:
        async with asyncio.timeout(drain_timeout):
            for host in hosts:
                await host.idle()
            await delivered()
    except TimeoutError:
        for host in hosts:
            host.cut()
    try:
        async with asyncio.timeout(FLUSH):
            await delivered()
    except TimeoutError:
        # One that never reads cannot hold anybody for longer.
        log.warning("some clients have not read their answers to the end")


async def stop_all(hosts: Iterable[Host]) -> None:
    """End these models' engines, all at the same time."""
    await asyncio.gather(*(host.stop() for host in hosts))
