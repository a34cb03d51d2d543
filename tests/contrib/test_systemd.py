"""The systemd unit, as systemd itself reads it."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd.config import ServerSettings, load
from mlxd.notify import BEAT

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "contrib/systemd/mlxd.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    """Its [Service] section; no key stands twice in it."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    """Every key is known and every value is one; only the program's path is this machine's."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    text = UNIT.read_text()
    program = "/opt/mlxd/.venv/bin/mlxd"
    assert program in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(program, sys.executable))

    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_stop_leaves_time_for_a_drain(service: configparser.SectionProxy) -> None:
    """Also before mlxd has asked for more; and only the daemon is sent SIGTERM."""
    shipped = load(ROOT / "etc/mlxd.toml", {}).server.drain_timeout

    assert int(service["TimeoutStopSec"]) >= 10 + max(shipped, ServerSettings().drain_timeout)
    assert service["KillMode"] == "mixed"


def test_it_waits_for_what_mlxd_says(service: configparser.SectionProxy) -> None:
    """Readiness and signs of life, more than one in the watchdog's time."""
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 2 * BEAT
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_one_model_out_of_memory_does_not_stop_all(service: configparser.SectionProxy) -> None:
    """systemd's default would end the daemon with the engine."""
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "on-failure"
