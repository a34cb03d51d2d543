"""The real daemon as a process, on fake engines, and a client of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.daemon.light import model_folder

ROOT = Path(__file__).parents[2]
LAUNCH = ("-m", "tests.daemon.launch")


class Daemon:
    """A daemon process, its log, and a client of it."""

    def __init__(self, process: Process, client: aiohttp.ClientSession) -> None:
        assert process.stderr is not None
        self.process = process
        self.client = client
        self.log: list[dict[str, Any]] = []
        self._stderr = process.stderr
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.base = ""

    async def _read(self) -> None:
        async for line in self._stderr:
            self.log.append(json.loads(line) if line.startswith(b"{") else {"raw": line.decode()})
            self._news.set()

    async def logged(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait for the nth line of this event."""
        async with asyncio.timeout(15):
            while True:
                found = [line for line in self.log if line.get("event") == event]
                if len(found) >= count:
                    return found[count - 1]
                self._news.clear()
                await self._news.wait()

    async def status(self, path: str) -> int:
        """Status of a GET."""
        async with self.client.get(self.base + path) as answer:
            return answer.status

    async def complete(self, max_tokens: int = 5, prompt: str = "hi") -> aiohttp.ClientResponse:
        """A whole completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        answer = await self.client.post(f"{self.base}/v1/completions", json=body)
        await answer.read()
        return answer

    async def stream(self, max_tokens: int = 5) -> aiohttp.ClientResponse:
        """A streamed completion that has sent its headers."""
        body = {"model": "tiny", "prompt": "hi", "max_tokens": max_tokens, "stream": True}
        return await self.client.post(f"{self.base}/v1/completions", json=body)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self, within: float = 10) -> int:
        """Its exit status."""
        status = await asyncio.wait_for(self.process.wait(), within)
        await self._reading
        return status


class Place:
    """A folder with a configuration, a model and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "mlxd.toml"
        self.gate = folder / "gate"
        self.model = model_folder(folder)
        self.environment: Mapping[str, str] = {}  # of the daemon, beside this process's own

    def write(
        self,
        *,
        listen: str = "127.0.0.1:0",
        drain_timeout: str = "10s",
        server: str = "",
        model: str = "",
        env: str = "",
        more: str = "",
    ) -> None:
        """The configuration file."""
        self.config.write_text(
            f"""
            [server]
            listen = "{listen}"
            drain_timeout = "{drain_timeout}"
            cache_dir = "{self.folder / "cache"}"
            {server}
            [log]
            format = "json"
            [models.tiny]
            source = "{self.model}"
            {model}
            [models.tiny.batch]
            width = 2
            [models.tiny.env]
            {env}
            {more}
            """
        )

    @asynccontextmanager
    async def daemon(self, *arguments: str) -> AsyncIterator[Daemon]:
        """The daemon as a process; killed if the test leaves it running."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(arguments or LAUNCH),
            str(self.config),
            cwd=ROOT,
            stdin=DEVNULL,
            stderr=PIPE,
            env={**os.environ, **self.environment},
        )
        async with aiohttp.ClientSession() as client:
            daemon = Daemon(process, client)
            try:
                yield daemon
            finally:
                if process.returncode is None:
                    process.kill()
                await daemon.ended()

    @asynccontextmanager
    async def serving(self, *, ready: bool = True) -> AsyncIterator[Daemon]:
        """A daemon that listens and, if asked for, whose model is ready."""
        async with self.daemon() as daemon:
            address = (await daemon.logged("listening"))["address"]
            daemon.base = f"http://{address}"
            if ready:
                await daemon.logged("model ready")
            yield daemon
