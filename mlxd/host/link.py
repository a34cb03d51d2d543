"""One engine process, and the frames to and from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from mlxd import wire
from mlxd.host.lastwords import LastWords
from mlxd.wire import Stop, ToDaemon, ToEngine

#: What is run for an engine; `--fd N` is added.
ENGINE_COMMAND = (sys.executable, "-m", "mlxd.engine")
#: Seconds for each step of ending a process: asked, told by end-of-file, terminated.
PATIENCE = 3.0
#: Seconds for the rest of the output of a process that is gone.
OUTPUT_REST = 1.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class BrokenFrame(Exception):
    """What came from the engine is not a frame; the stream cannot be trusted further."""


class EngineLink:
    """Owns the process and the daemon's end of its socket.

    End-of-file on the socket is how the daemon learns that the engine is gone:
    `frames` ends. Then `ended` gives the exit status and `last_words` the
    reason, as far as it was printed.
    """

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        words: LastWords,
        output: asyncio.StreamReader,
        patience: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._words = words
        self._patience = patience
        self._force: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)
        self._output = asyncio.create_task(words.read(output))

    @classmethod
    async def open(
        cls,
        model: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        patience: float = PATIENCE,
    ) -> EngineLink:
        """Start an engine by exec, with one end of a socket pair and no other file of ours.

        Args:
            patience: seconds for each step of ending it.

        Raises:
            OSError: the command cannot be run.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # The process last: what is cancelled while it waits leaves none behind.
            reader, writer = await _connection(ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=STDOUT,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    # A Ctrl-C in the terminal is for the daemon, which drains first.
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
        engine_log = log.bind(model=model, pid=process.pid)
        words = LastWords(lambda line: engine_log.info("engine output", line=line))
        assert process.stdout is not None  # noqa: S101 - it was asked for as a pipe
        return cls(process, reader, writer, words, process.stdout, patience)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines that the engine printed."""
        return self._words.lines

    def send(self, message: ToEngine) -> None:
        """Hand over a frame without waiting. A frame to an engine that is gone is dropped:
        the end of `frames` tells, once, for all of them.
        """
        if not self._writer.is_closing():
            self._writer.write(wire.pack(message))

    async def frames(self) -> AsyncGenerator[ToDaemon, None]:
        """What the engine says, until it is gone.

        Raises:
            BrokenFrame: it said something that is no frame.
        """
        while True:
            try:
                header = await self._reader.readexactly(wire.HEADER_BYTES)
                body = await self._reader.readexactly(wire.body_length(header))
                frame = wire.unpack_to_daemon(body)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except (ValueError, msgspec.MsgspecError) as error:
                raise BrokenFrame(str(error)) from error
            yield frame

    async def ended(self) -> int:
        """Wait, for a bounded time, until the process is gone; returns its exit status.

        Called when `frames` has ended or is not to be believed, so that an engine
        that lives on without its socket is ended by force.
        """
        self._writer.close()
        for force in self._force:
            if await self._exits_in_time():
                break
            self._signal(force)
        status = await self._process.wait()
        # A grandchild may hold the pipe open for longer than anyone wants to wait.
        await asyncio.wait([self._output], timeout=OUTPUT_REST)
        self._output.cancel()
        return status

    async def stop(self) -> int:
        """End the engine: asked first, then by end-of-file, then by force.

        Returns:
            The exit status.
        """
        self.send(Stop())
        await self._exits_in_time()
        return await self.ended()

    def terminate(self) -> None:
        """End the engine without asking and without waiting.

        Not by SIGKILL: a compiler that is ended so leaves half a file in the
        cache of compiled kernels.
        """
        self._signal(signal.SIGTERM)

    def abort(self) -> None:
        """End an engine that hangs: `frames` ends now, whatever the process does.

        SIGABRT has it say where it was; `ended` kills one that does not even do that.
        """
        self._writer.transport.abort()
        self._force = (signal.SIGKILL,)
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)  # one that was stopped meets it now

    def _signal(self, number: signal.Signals) -> None:
        # One that was reaped has no id any more: another process may have it by now.
        if self._process.returncode is not None:
            return
        # Its whole session: a compiler that it started would keep its pipe open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _exits_in_time(self) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                await self._process.wait()
        except TimeoutError:
            return False
        return True


async def _connection(ours: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_unix_connection(sock=ours)
    except BaseException:
        ours.close()
        raise


def engine_environment(
    daemon: Mapping[str, str],
    *,
    scratch: Path,
    blas: Mapping[str, str],
    model: Mapping[str, str],
) -> dict[str, str]:
    """An engine's environment: the daemon's without its settings, then what is the engine's own.

    Args:
        scratch: its private temporary folder, kept between runs for what MLX compiles.
        blas: variables that select the BLAS.
        model: the model's `env` table; it has the last word.
    """
    inherited = {name: value for name, value in daemon.items() if not name.startswith("MLXD_")}
    return {**inherited, "TMPDIR": str(scratch), **blas, **model}
