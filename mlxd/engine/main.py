"""The engine process: read the inbox, step the scheduler, write the outbox.

One plain loop, no threads, no asyncio. The process ends when the daemon's end
of the socket closes, on `Stop`, or after it said why it cannot load.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxd import wire
from mlxd.blas import identify
from mlxd.engine import attention, budgets, compiler, loading, memory, warmup
from mlxd.engine.runner import Runner
from mlxd.engine.scheduler import Scheduler
from mlxd.wire import Budget, Cancel, ClearCache, Held, Phase, Retune, Start, Step, Stop, Submit

#: Seconds without work after which memory that only rows need is given back.
REST_AFTER = 5.0


class Disconnected(Exception):
    """The daemon is gone."""


class Link:
    """The engine's end of the socketpair."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        # A compiler that outlives the engine would hide its end from the daemon.
        self._socket.set_inheritable(False)  # the library takes it so
        self._buffer = bytearray()

    def send(self, *messages: wire.ToDaemon) -> None:
        """Write frames; blocks while the daemon does not read.

        Raises:
            Disconnected: the daemon is gone.
        """
        try:
            self._socket.sendall(b"".join(wire.pack(message) for message in messages))
        except OSError as error:
            raise Disconnected from error

    def first(self) -> wire.ToEngine:
        """Wait for one frame and leave what follows it for `receive`.

        Raises:
            Disconnected: end of file.
        """
        while (message := self._next()) is None:
            self._read(block=True)
        return message

    def waits(self, seconds: float) -> bool:
        """Wait for news, but not longer than this; whether there is any."""
        return bool(self._buffer or select.select([self._socket], [], [], seconds)[0])

    def receive(self, *, wait: bool) -> list[wire.ToEngine]:
        """Every frame that has arrived, in order; with `wait`, at least one.

        Raises:
            Disconnected: end of file.
        """
        messages: list[wire.ToEngine] = []
        while True:
            while (message := self._next()) is not None:
                messages.append(message)
            if not self._read(block=wait and not messages):
                return messages

    def _read(self, *, block: bool) -> bool:
        """Read once into the buffer; False where nothing has arrived."""
        try:
            data = self._socket.recv(1 << 20, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        self._buffer += data
        return True

    def _next(self) -> wire.ToEngine | None:
        """Take one complete frame off the buffer."""
        if len(self._buffer) < wire.HEADER_BYTES:
            return None
        end = wire.HEADER_BYTES + wire.body_length(bytes(self._buffer[: wire.HEADER_BYTES]))
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[wire.HEADER_BYTES : end])
        del self._buffer[:end]
        return wire.unpack_to_engine(body)


def run(fd: int) -> int:
    """Serve one model over the inherited socket; the process's exit status."""
    link = Link(fd)
    try:
        return _serve(link)
    except Disconnected:
        return 0


def _serve(link: Link) -> int:
    # Compilers that MLX starts would inherit the preloaded library.
    os.environ.pop("LD_PRELOAD", None)
    link.send(_hello())
    start = link.first()
    if not isinstance(start, Start):
        raise TypeError(f"the first frame must be Start, not {type(start).__name__}")
    size = loading.weight_file_bytes(Path(start.model_path))
    link.send(Phase("load", budgets.load(size)))
    with ExitStack() as held:
        try:
            if start.kernels == "native" and sys.platform == "linux" and _on_cpu():
                compiler.install(os.environ, Path(tempfile.gettempdir()))
            loaded = loading.load(start)
            _wire_memory()
            held.enter_context(attention.seam(loaded.model, start.attention))
            link.send(Phase("warmup", budgets.WARMUP))
            runner = Runner(loaded, start.batch)
            warmed = warmup.run(runner, loaded, start.batch)
        except Exception as error:  # noqa: BLE001  # told to the daemon, which tells the operator
            link.send(wire.LoadFailed(f"{type(error).__name__}: {error}"))
            return 1
        ready = wire.Ready(
            warmed.capabilities,
            loaded.seconds,
            warmed.seconds,
            weight_bytes=loaded.weight_bytes,
            working_bytes=warmed.working_bytes,
            device_bytes=memory.of_device(),
        )
        link.send(ready, Phase("idle", None))
        scheduler = Scheduler(runner, start.batch, warmed.pace, time.perf_counter)
        return _loop(link, scheduler, runner)


class _Account:
    """What the daemon knows of the memory that rows and the prefix cache take."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._told = Held(0, 0)

    def heard(self, events: Sequence[wire.ToDaemon]) -> None:
        """These were sent."""
        for event in events:
            if isinstance(event, Step):
                self._told = Held(event.kv_bytes, event.prefix_bytes)

    def news(self) -> list[wire.ToDaemon]:
        """What has changed since, told once."""
        now = Held(self._runner.kv_bytes, self._runner.prefix_bytes)
        if now == self._told:
            return []
        self._told = now
        return [now]


def _loop(link: Link, scheduler: Scheduler, runner: Runner) -> int:
    """The loop itself."""
    account = _Account(runner)
    while True:
        if scheduler.idle:
            # No step tells what ended rows, a smaller budget or a cleared cache gave back.
            link.send(*account.news(), Phase("idle", None))
            if not link.waits(REST_AFTER):
                runner.rest()
                link.send(*account.news())
        for message in link.receive(wait=scheduler.idle):
            if isinstance(message, Stop):
                return 0
            _hear(message, scheduler)
        if not scheduler.idle:
            # Each unit of work is announced anew: its budget starts here.
            link.send(scheduler.phase)
            events = scheduler.step()
            link.send(*events)
            account.heard(events)
            if scheduler.broken:
                # What MLX or the device has got into, only a new process gets out of.
                print("every step fails; the engine gives up", file=sys.stderr)  # noqa: T201
                return 1


def _hear(message: wire.ToEngine, scheduler: Scheduler) -> None:
    match message:
        case Submit():
            scheduler.submit(message)
        case Cancel():
            scheduler.cancel(message)
        case Retune(batch):
            scheduler.retune(batch)
        case ClearCache():
            scheduler.runner.clear_cache()
        case Budget(kv_bytes):
            scheduler.limit(kv_bytes)


def _hello() -> wire.Hello:
    on_cpu = _on_cpu()
    # The first product maps what the loader has not yet.
    mx.eval(mx.ones((4, 4)) @ mx.ones((4, 4)))
    blas = wire.Blas("none", None)
    if sys.platform == "darwin" and on_cpu:
        blas = wire.Blas("accelerate", None)
    elif on_cpu:
        blas = identify(Path("/proc/self/maps").read_text())
    return wire.Hello(
        pid=os.getpid(),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        device="cpu" if on_cpu else "gpu",
        blas=blas,
    )


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def _wire_memory() -> None:
    """On Metal, keep up to the recommended working set resident; set once, never restored."""
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
