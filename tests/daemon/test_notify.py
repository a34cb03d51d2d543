"""What a service manager is told, over a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd.notify import BEAT, Manager, Notifier, summary
from mlxd.operations import DaemonStatus, LaneCounts
from tests.daemon.process import Place
from tests.daemon.test_admin import MODEL


class Systemd:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(15)

    def hear(self) -> dict[str, str]:
        """The next notification."""
        text = self.socket.recv(4096).decode()
        return dict(line.split("=", 1) for line in text.splitlines())

    def hear_until(self, name: str) -> dict[str, str]:
        """The next notification that says this; others are passed over."""
        while name not in (said := self.hear()):
            pass
        return said


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where it listens."""
    return str(tmp_path / "notify")


@pytest.fixture
def systemd(path: str) -> Iterator[Systemd]:
    """A manager that listens."""
    manager = Systemd(path)
    with closing(manager.socket):
        yield manager


def status(state: str, *others: str) -> DaemonStatus:
    """Of a daemon with a model that is ready, and others in these states."""
    models = [MODEL, *(replace(MODEL, state=other) for other in others)]
    return DaemonStatus(state, "1", "abc", reloading=False, models=models)  # type: ignore[arg-type]


def test_ready_comes_once_nothing_loads(systemd: Systemd, path: str) -> None:
    """Until then the start is given more time, beat by beat; afterwards it is not said again."""
    notifier = Notifier(Manager(path, watchdog=None))
    notifier.beat(status("starting", "starting"))
    for state in ("ready", "draining"):
        notifier.beat(status(state))

    starting, ready, later = systemd.hear(), systemd.hear(), systemd.hear()
    assert "READY" not in starting
    assert int(starting["EXTEND_TIMEOUT_USEC"]) > BEAT * 1e6
    assert (ready["READY"], ready["WATCHDOG"]) == ("1", "1")
    assert "READY" not in later
    assert later["WATCHDOG"] == "1"


def test_models_that_all_failed_are_a_start_too(systemd: Systemd, path: str) -> None:
    """The daemon serves, if only its status: a start that never ends would hide why."""
    Notifier(Manager(path, watchdog=None)).beat(status("unavailable"))

    assert systemd.hear()["READY"] == "1"


def test_one_that_failed_beside_others_is_a_start_too(systemd: Systemd, path: str) -> None:
    """Nothing loads any more: a start that never ends would take the others down with it."""
    Notifier(Manager(path, watchdog=None)).beat(status("starting", "failed"))

    assert systemd.hear()["READY"] == "1"


def test_a_reload_says_when_it_began(systemd: Systemd, path: str) -> None:
    """In microseconds of the monotonic clock, as `Type=notify-reload` wants it."""
    notifier = Notifier(Manager(path, watchdog=None))
    notifier.beat(status("ready"))
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    notifier.reloaded()

    systemd.hear()
    began = systemd.hear()
    assert began["RELOADING"] == "1"
    assert before <= int(began["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert systemd.hear() == {"READY": "1"}


def test_a_reload_during_the_start_is_part_of_it(systemd: Systemd, path: str) -> None:
    """READY would be said too early."""
    notifier = Notifier(Manager(path, watchdog=None))
    notifier.reloading()
    notifier.reloaded()
    notifier.beat(status("starting", "starting"))

    assert "EXTEND_TIMEOUT_USEC" in systemd.hear()


def test_stopping_asks_for_the_drains_time(systemd: Systemd, path: str) -> None:
    """A long drain_timeout need not stand in the unit, too; nobody is ready after it."""
    notifier = Notifier(Manager(path, watchdog=None))
    notifier.stopping(90)
    notifier.beat(status("stopping"))

    assert systemd.hear() == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "90000000"}
    assert "READY" not in systemd.hear()


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="abstract names are Linux's")
def test_an_abstract_name_is_understood() -> None:
    """Containers use them."""
    name = f"mlxd-test-{os.getpid()}"
    manager = Systemd(f"\0{name}")
    with closing(manager.socket):
        Notifier(Manager(f"@{name}", watchdog=None)).stopping(1)

        assert manager.hear()["STOPPING"] == "1"


def test_a_manager_that_is_gone_costs_one_line(path: str) -> None:
    """Serving goes on; it is told once, not at every beat."""
    notifier = Notifier(Manager(path, watchdog=None))
    with capture_logs() as lines:
        notifier.beat(status("ready"))
        notifier.beat(status("ready"))

    assert [line["event"] for line in lines] == ["the service manager cannot be told"]


@pytest.mark.parametrize(
    ("environ", "manager"),
    [
        ({}, Manager(None, None)),
        ({"NOTIFY_SOCKET": ""}, Manager(None, None)),
        ({"NOTIFY_SOCKET": "/s"}, Manager("/s", None)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "3000000"}, Manager("/s", 3.0)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "0"}, Manager("/s", None)),
        ({"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "soon"}, Manager("/s", None)),
        (
            {"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"},
            Manager("/s", None),
        ),
    ],
)
def test_the_environment_says_who_wants_to_be_told(
    environ: dict[str, str], manager: Manager
) -> None:
    """A watchdog that is meant for another process is not fed."""
    assert Manager.of(environ) == manager


@pytest.mark.parametrize(
    ("manager", "interval"),
    [(Manager(None, 1.0), None), (Manager("/s", None), BEAT), (Manager("/s", 4.0), 2.0)],
)
def test_a_watchdog_gets_two_signs_in_its_time(manager: Manager, interval: float | None) -> None:
    """One may be late."""
    assert Notifier(manager).interval == interval


def test_the_status_is_one_line() -> None:
    """For `systemctl status`."""
    assert summary(status("ready")) == ("ready: 1 of 1 models ready, 2 requests running, 1 waiting")
    assert MODEL.running == LaneCounts(batch=2)


async def test_a_real_daemon_says_all_of_it(tmp_path: Path, systemd: Systemd, path: str) -> None:
    """Starting, ready, alive, reloading and stopping, in this order, then exit 0."""
    place = Place(tmp_path)
    place.write(env=f'FAKE_LOAD = "{place.gate}"')
    place.environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"}

    async def heard(name: str) -> dict[str, str]:
        return await asyncio.to_thread(systemd.hear_until, name)

    async with place.serving(ready=False) as daemon:
        loading = await heard("EXTEND_TIMEOUT_USEC")
        assert loading["STATUS"].startswith("starting: 0 of 1 models ready")
        place.gate.touch()
        assert (await heard("READY"))["STATUS"].startswith("ready: 1 of 1")
        await heard("WATCHDOG")
        daemon.signal(signal.SIGHUP)
        await heard("RELOADING")
        assert (await heard("READY"))["READY"] == "1"
        daemon.signal(signal.SIGTERM)
        assert int((await heard("STOPPING"))["EXTEND_TIMEOUT_USEC"]) >= 10e6
        assert await daemon.ended() == 0
