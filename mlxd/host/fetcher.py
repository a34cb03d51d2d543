"""A model's source as a local folder: at once where it is there, else by a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from mlxd.host.lastwords import LastWords
from mlxd.models import Source, local_path, parse

#: What is run to fetch; `SOURCE --cache DIR` is added. It prints the folder.
FETCH_COMMAND = (sys.executable, "-m", "mlxd.models")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class FetchFailed(Exception):
    """The model could not be had; the message is what the child process said last."""


class Fetcher:
    """Finds or fetches models into one cache folder."""

    def __init__(
        self,
        cache: Path,
        command: Sequence[str] = FETCH_COMMAND,
        find: Callable[[Source, Path], Path | None] = local_path,
    ) -> None:
        """
        Args:
            find: looks for a source's folder on this machine; may block.
        """
        self._cache = cache
        self._command = command
        self._find = find

    async def locate(self, source: str) -> Path:
        """The folder of this source. Cancelling ends a fetch; the next one resumes or restarts it.

        Raises:
            FetchFailed: there is no such model, or it could not be fetched.
        """
        # In a thread: the hub's library takes a moment to import, and its cache one to walk.
        folder = await asyncio.to_thread(self._find, parse(source), self._cache)
        return folder if folder is not None else await self._fetch(source)

    async def _fetch(self, source: str) -> Path:
        fetch_log = log.bind(source=source)
        fetch_log.info("fetching the model")
        child = await asyncio.create_subprocess_exec(
            *self._command,
            source,
            "--cache",
            str(self._cache),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is for the daemon
        )
        assert child.stdout is not None and child.stderr is not None  # noqa: S101, PT018 - pipes
        answer = LastWords(lambda line: fetch_log.debug("fetch output", line=line))
        progress = LastWords(lambda line: fetch_log.info("fetching", progress=line))
        try:
            await asyncio.gather(answer.read(child.stdout), progress.read(child.stderr))
            status = await child.wait()
        except asyncio.CancelledError:
            if child.returncode is None:  # else another process may have its id by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)  # what it started, too
            await child.wait()
            raise
        if status != 0 or not answer.lines:
            said = progress.lines[-1] if progress.lines else f"exit status {status}"
            raise FetchFailed(f"cannot fetch {source}: {said}")
        return Path(answer.lines[-1])
