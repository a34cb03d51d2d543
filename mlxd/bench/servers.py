"""The servers under measurement: each is started, waited for, and always stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from mlxd import blas
from mlxd.wire import Blas

HOST = "127.0.0.1"
#: The daemon's id of the model.
MODEL = "bench"
#: Of a daemon on loopback that lives as long as one run.
TOKEN = "bench-admin-token"
#: Rows that both servers decode together.
WIDTH = 16
#: Seconds: for a model to load and warm up; between two looks; for a server to end when asked.
READY = 900.0
LOOK = 0.1
STOP = 40.0


class ServerFailed(Exception):
    """A server that did not become ready; the message has its last words."""


class _Engine(msgspec.Struct):
    blas: Blas


class _Model(msgspec.Struct):
    engine: _Engine | None


class _Status(msgspec.Struct):
    """Of `/admin/status`, what is asked of it here."""

    models: list[_Model]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a scenario asks of mlxd beyond its defaults."""

    batch: str = ""  # lines of the model's batch table
    keys: Sequence[str] = ()  # of callers, each its own name; none = open to every caller


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server, on a port that is free now."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    ready_path: str  # answers 200 when requests can be sent
    model: str  # what requests name
    token: str | None = None  # for the admin API

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class Server:
    """A started one."""

    launch: Launch
    process: Process


NOTHING = Needs()
#: Makes a launch for a model folder; the second folder is for files that the server needs.
Launcher = Callable[[Path, Path, Needs], Launch]


def mlxd(folder: Path, scratch: Path, needs: Needs = NOTHING) -> Launch:
    """This daemon with its defaults, as a user would start it, but for what is needed."""
    port = free_port()
    config = scratch / f"mlxd-{port}.toml"
    guarded = ""
    if needs.keys:
        keys, token = scratch / f"keys-{port}", scratch / f"token-{port}"
        _write_secret(keys, "".join(f"{key}:{key}\n" for key in needs.keys))
        _write_secret(token, f"{TOKEN}\n")
        guarded = f'api_keys_file = "{keys}"\n\n[admin]\ntoken_file = "{token}"\n'
    # JSON strings are TOML strings.
    config.write_text(
        f'[server]\nlisten = "{HOST}:{port}"\n{guarded}\n'
        f"[models.{MODEL}]\nsource = {json.dumps(str(folder))}\n\n"
        f"[models.{MODEL}.batch]\nwidth = {WIDTH}\n{needs.batch}\n"
    )
    return Launch(
        name="mlxd",
        command=(sys.executable, "-m", "mlxd", "serve", "--config", str(config)),
        environment=_own_environment(),
        port=port,
        ready_path="/readyz",
        model=MODEL,
        token=TOKEN if needs.keys else None,
    )


def mlx_lm(folder: Path, _scratch: Path, _needs: Needs = NOTHING) -> Launch:
    """mlx-lm's server with its defaults, as many rows, and the BLAS that mlxd gives its engines."""
    port = free_port()
    arguments = ("--model", str(folder), "--host", HOST, "--port", str(port))
    return Launch(
        name="mlx_lm.server",
        command=(
            *(sys.executable, "-m", "mlx_lm", "server", *arguments),
            *("--decode-concurrency", str(WIDTH)),
        ),
        environment=engine_environment(),
        port=port,
        ready_path="/health",
        model="default_model",
    )


LAUNCHERS: Mapping[str, Launcher] = {"mlxd": mlxd, "mlx_lm.server": mlx_lm}
#: The one that the others are compared with.
REFERENCE = "mlx_lm.server"


def engine_environment() -> dict[str, str]:
    """The environment of a process that computes, with the BLAS that mlxd would choose."""
    own = _own_environment()
    return own | blas.environment(blas.find("auto"), own.get("LD_PRELOAD"))


def _own_environment() -> dict[str, str]:
    # Settings for the user's daemon would change what is measured, or refuse the start.
    return {name: value for name, value in os.environ.items() if not name.startswith("MLXD_")}


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def started(launch: Launch, scratch: Path) -> AsyncIterator[Server]:
    """The process, not yet ready. Leaving the context stops it.

    Raises:
        OSError: it cannot be run.
    """
    with log_of(launch, scratch).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *launch.command,
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            env=launch.environment,
            # A Ctrl-C in the terminal is for the bench, which stops its servers.
            start_new_session=True,
        )
    try:
        yield Server(launch, process)
    finally:
        await _stop(process)


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP):
            await process.wait()
    except TimeoutError:
        pass  # killed below, as when a second Ctrl-C comes
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def ready(
    launch: Launch, scratch: Path, session: aiohttp.ClientSession
) -> AsyncIterator[Server]:
    """The process, ready for requests.

    Raises:
        OSError: it cannot be run.
        ServerFailed: it ended, or was not ready in time.
    """
    async with started(launch, scratch) as server:
        await wait_until_ready(server, scratch, session)
        yield server


async def wait_until_ready(server: Server, scratch: Path, session: aiohttp.ClientSession) -> None:
    """Look until the server says that it is ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    launch = server.launch
    deadline = time.monotonic() + READY
    while not await _answers(session, launch.url + launch.ready_path):
        if server.process.returncode is not None or time.monotonic() > deadline:
            raise ServerFailed(f"{launch.name} did not start:\n{last_words(launch, scratch)}")
        await asyncio.sleep(LOOK)


def log_of(launch: Launch, scratch: Path) -> Path:
    """Where the server's output goes."""
    return scratch / f"{launch.name}-{launch.port}.log"


def last_words(launch: Launch, scratch: Path, lines: int = 20) -> str:
    """The end of the server's output."""
    text = log_of(launch, scratch).read_text(errors="replace")
    return "\n".join(text.splitlines()[-lines:])


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def mapped_blas(server: Server, session: aiohttp.ClientSession) -> Blas | None:
    """The BLAS that a ready server's process has really mapped; None where it cannot be told.

    Raises:
        msgspec.ValidationError: the daemon's status is of another version.
    """
    if server.launch.name == "mlxd":
        token = server.launch.token
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        async with session.get(f"{server.launch.url}/admin/status", headers=headers) as response:
            status = msgspec.json.decode(await response.read(), type=_Status)
        engine = status.models[0].engine
        return None if engine is None else engine.blas
    return _blas_of(server.process.pid)


def _blas_of(pid: int) -> Blas | None:
    maps = Path(f"/proc/{pid}/maps")
    return blas.identify(maps.read_text()) if maps.exists() else None
