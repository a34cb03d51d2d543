"""The daemon's own start: how soon it listens, how it answers meanwhile, what it weighs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from mlxd.bench import servers
from mlxd.bench.figures import Figures, Metric, percentile
from mlxd.bench.servers import HOST, READY, Server, ServerFailed

#: Cold starts that the medians are of.
STARTS = 5
#: Seconds between two attempts to connect, and between two probes of a listening daemon.
CONNECT_EVERY = 0.002
PROBE_EVERY = 0.005


async def run(folder: Path, scratch: Path) -> Figures:
    """One cold start, up to readiness.

    Raises:
        ServerFailed: the daemon ended, or was not ready in time.
    """
    launch = servers.mlxd(folder, scratch)
    began = time.monotonic()
    async with servers.started(launch, scratch) as server, aiohttp.ClientSession() as session:
        await _connected(server, began)
        await _get(session, f"{launch.url}/livez")
        listening = time.monotonic() - began
        delays = await _probe_until_ready(session, server, scratch)
        return {
            Metric.LISTENING: listening,
            Metric.READY: time.monotonic() - began,
            Metric.RESIDENT_BYTES: resident_bytes(server.process.pid),
            Metric.LIVEZ_P50: percentile(delays, 0.50),
            Metric.LIVEZ_P99: percentile(delays, 0.99),
            Metric.LIVEZ_MAX: max(delays),
        }


async def _connected(server: Server, began: float) -> None:
    while True:
        try:
            _reader, writer = await asyncio.open_connection(
                HOST, server.launch.port, family=socket.AF_INET
            )
        except OSError:
            if server.process.returncode is not None or time.monotonic() - began > READY:
                raise ServerFailed("mlxd does not listen") from None
            await asyncio.sleep(CONNECT_EVERY)
        else:
            writer.close()
            return


async def _probe_until_ready(
    session: aiohttp.ClientSession, server: Server, scratch: Path
) -> list[float]:
    """Seconds that each `/livez` took, until the daemon is ready."""
    delays: list[float] = []
    waiting = asyncio.create_task(servers.wait_until_ready(server, scratch, session))
    try:
        while not waiting.done():
            began = time.monotonic()
            await _get(session, f"{server.launch.url}/livez")
            delays.append(time.monotonic() - began)
            await asyncio.sleep(PROBE_EVERY)
        await waiting
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
    return delays


async def _get(session: aiohttp.ClientSession, url: str) -> None:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise ServerFailed(f"{url} answered {response.status}")
    except aiohttp.ClientError as error:
        raise ServerFailed(f"{url} does not answer: {error}") from error


def resident_bytes(pid: int) -> int:
    """Memory of one process, without its children, that is in RAM.

    Raises:
        OSError, subprocess.CalledProcessError: there is no such process.
    """
    if sys.platform == "linux":
        status = Path(f"/proc/{pid}/status").read_text()
        kibibytes = next(line.split()[1] for line in status.splitlines() if "VmRSS" in line)
    else:
        kibibytes = subprocess.run(
            ["/bin/ps", "-o", "rss=", "-p", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    return int(kibibytes) * 1024
