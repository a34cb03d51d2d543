"""What a service manager is told: systemd's notification protocol over its datagram socket.

Without a manager that asks, everything here does nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from mlxd.operations import DaemonStatus

#: Seconds between two signs of life; a watchdog that is shorter gets two in its time.
BEAT = 5.0
#: Seconds that systemd is to wait on for the next sign of life while models load.
LOADING = 6 * BEAT

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Manager:
    """What the environment says of whoever started this process."""

    socket: str | None  # None = nobody wants to be told
    watchdog: float | None  # seconds without a sign of life that it takes for a hang

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Manager:
        """From `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`."""
        microseconds = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog = int(microseconds) / 1e6 if meant and microseconds.isdecimal() else None
        return cls(environ.get("NOTIFY_SOCKET") or None, watchdog or None)


class Notifier:
    """Tells the manager of one run. Nothing that goes wrong here may cost a request."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._ready = False
        self._stopping = False
        self._failed = False

    @property
    def interval(self) -> float | None:
        """Seconds between two calls of `beat`; None = nobody waits for them."""
        if self._manager.socket is None:
            return None
        watchdog = self._manager.watchdog
        return BEAT if watchdog is None else min(BEAT, watchdog / 2)

    def beat(self, status: DaemonStatus) -> None:
        """The event loop is alive. The first that finds no model loading any more is `READY`."""
        said = ["WATCHDOG=1", f"STATUS={summary(status)}"]
        if self._ready or self._stopping:
            self._send(*said)
        elif status.state == "starting" and any(m.state == "starting" for m in status.models):
            # Loading takes what it takes; only an event loop that hangs meets the timeout.
            self._send(*said, f"EXTEND_TIMEOUT_USEC={_microseconds(LOADING)}")
        else:
            self._ready = self._send(*said, "READY=1")

    def reloading(self) -> None:
        """A reload begins that `reloaded` ends; during the start it is part of that."""
        if self._ready:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """The reload is over, whether or not it has changed anything."""
        if self._ready:
            self._send("READY=1")

    def stopping(self, seconds: float) -> None:
        """The drain begins, and everything has ended after this time."""
        self._stopping = True
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={_microseconds(seconds)}")

    def _send(self, *assignments: str) -> bool:
        """Returns whether it was taken."""
        path = self._manager.socket
        if path is None:
            return False
        # A name of Linux's abstract namespace is written with an "@".
        address = f"\0{path[1:]}" if path.startswith("@") else path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(0)
                sender.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            if not self._failed:  # it will be so at every beat
                log.warning("the service manager cannot be told", socket=path, reason=str(error))
            self._failed = True
            return False
        return True


def summary(status: DaemonStatus) -> str:
    """The daemon's state in one line, as `systemctl status` shows it."""
    ready = sum(model.state == "ready" for model in status.models)
    running = sum(model.running.batch + model.running.serial for model in status.models)
    waiting = sum(model.waiting.batch + model.waiting.serial for model in status.models)
    return (
        f"{status.state}: {ready} of {len(status.models)} models ready, "
        f"{running} requests running, {waiting} waiting"
    )


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
