"""The launchd property list."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

import pytest

from mlxd.config import ServerSettings, load

ROOT = Path(__file__).parents[2]
FILE = ROOT / "contrib/launchd/io.github.mlxd.plist"


@pytest.fixture
def job() -> dict[str, Any]:
    """The job that the file describes."""
    described: dict[str, Any] = plistlib.loads(FILE.read_bytes())
    return described


def test_the_label_is_the_files_name(job: dict[str, Any]) -> None:
    """launchctl names jobs by their label, and people by their file."""
    assert f"{job['Label']}.plist" == FILE.name


def test_every_path_is_absolute(job: dict[str, Any]) -> None:
    """launchd expands neither "~" nor variables."""
    program, option, config = job["ProgramArguments"]

    assert option == "--config"
    for path in (
        program,
        config,
        *(job[key] for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")),
    ):
        assert path.startswith("/Users/me/"), path


def test_launchd_waits_longer_than_a_drain(job: dict[str, Any]) -> None:
    """Otherwise it would kill what SIGTERM lets finish."""
    shipped = load(ROOT / "etc/mlxd.toml", {}).server.drain_timeout

    assert job["ExitTimeOut"] >= 20 + max(shipped, ServerSettings().drain_timeout)


def test_a_crash_is_restarted_slowly_and_a_clean_exit_is_not(job: dict[str, Any]) -> None:
    """A drained daemon stays down; a wrong configuration does not spin."""
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ThrottleInterval"] >= 10


def test_the_scheduler_treats_it_as_somebody_waiting(job: dict[str, Any]) -> None:
    """A background job would be throttled."""
    assert job["ProcessType"] == "Interactive"
