"""What a child process printed: its lines, and the last few of them."""

from __future__ import annotations

import re
from asyncio import StreamReader
from collections import deque
from collections.abc import Callable, Sequence

KEPT_LINES = 100
MAX_LINE_BYTES = 2_000
_CHUNK_BYTES = 64 * 1024

#: Lines of what Python's faulthandler prints when native code ends the process.
_DUMP = re.compile(
    r"Fatal Python error: |(Current thread|Thread) 0x|  File \"|  <no Python frame>|  \.\.\.$"
    r"|Extension modules: |(Current thread's )?C stack trace|  Binary file \"|  <truncated"
)


def cause(lines: Sequence[str]) -> str | None:
    """The line that tells best why a process ended: its last, or that before a crash's dump."""
    told = [line for line in lines if not _DUMP.match(line)]
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]
    if fatal and lines.index(fatal[-1]) == 0:
        return fatal[-1]
    return told[-1] if told else None


class LastWords:
    """Splits output into lines and remembers the last; a line is cut, never refused."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """
        Args:
            tell: called with every line that is not empty.
        """
        self._tell = tell
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._tail = b""

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._kept)

    async def read(self, stream: StreamReader) -> None:
        """Read a stream to its end."""
        while chunk := await stream.read(_CHUNK_BYTES):
            # A progress bar ends its lines with a carriage return.
            *lines, self._tail = (self._tail + chunk.replace(b"\r", b"\n")).split(b"\n")
            for line in lines:
                self._keep(line)
            self._tail = self._tail[:MAX_LINE_BYTES]
        self._keep(self._tail)
        self._tail = b""

    def _keep(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self._kept.append(text)
            self._tell(text)
