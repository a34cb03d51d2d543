"""The launchd property lists."""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlxd.config import ServerSettings, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "contrib/launchd"
AGENT = FOLDER / "agent/io.github.mlxd.plist"
DAEMON = FOLDER / "daemon/io.github.mlxd.plist"


def described(file: Path) -> dict[str, Any]:
    """The job that a file describes."""
    job: dict[str, Any] = plistlib.loads(file.read_bytes())
    return job


@pytest.fixture(params=[AGENT, DAEMON], ids=["agent", "daemon"])
def file(request: pytest.FixtureRequest) -> Path:
    """Either variant."""
    variant: Path = request.param
    return variant


@pytest.fixture
def job(file: Path) -> dict[str, Any]:
    """The job that it describes."""
    return described(file)


def test_the_label_is_the_files_name(job: dict[str, Any], file: Path) -> None:
    """launchctl names jobs by their label, and people by their file."""
    assert f"{job['Label']}.plist" == file.name


def test_every_path_is_absolute(job: dict[str, Any]) -> None:
    """launchd expands neither "~" nor variables."""
    program, option, config = job["ProgramArguments"]

    assert option == "--config"
    for path in (
        program,
        config,
        *(job[key] for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")),
        *job["EnvironmentVariables"].values(),
    ):
        assert path.startswith(("/Users/me/", "/usr/local/")), path


def test_launchd_waits_longer_than_a_drain(job: dict[str, Any]) -> None:
    """Otherwise it would kill what SIGTERM lets finish."""
    shipped = load(ROOT / "etc/mlxd.toml", {}).server.drain_timeout

    assert job["ExitTimeOut"] > 10 + max(shipped, ServerSettings().drain_timeout)


def test_a_crash_is_restarted_slowly_and_a_clean_exit_is_not(job: dict[str, Any]) -> None:
    """A drained daemon stays down; a wrong configuration does not spin."""
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ThrottleInterval"] >= 10


def test_it_is_treated_as_somebody_waiting_with_many_files(job: dict[str, Any]) -> None:
    """A background job would be throttled, and 256 files are few connections."""
    assert job["ProcessType"] == "Interactive"
    assert job["SoftResourceLimits"]["NumberOfFiles"] >= 4096


def test_the_variables_are_keys_of_the_configuration(job: dict[str, Any], tmp_path: Path) -> None:
    """An unknown one would keep mlxd from starting."""
    file = tmp_path / "mlxd.toml"
    file.write_text('[models.a]\nsource = "owner/a"\n')

    settings = load(file, job["EnvironmentVariables"])

    assert settings.log.file is not None
    assert settings.log.file == job["EnvironmentVariables"]["MLXD_LOG__FILE"]
    assert Path(settings.log.file).parent == Path(job["StandardErrorPath"]).parent


def test_the_daemon_has_folders_of_its_own_and_is_not_root() -> None:
    """It has neither a home nor a user's temporary folder."""
    job = described(DAEMON)
    variables = job["EnvironmentVariables"]

    assert job["UserName"] == "me"
    assert job["Umask"] == 0o077
    for name in ("HOME", "TMPDIR", "MLXD_SERVER__CACHE_DIR", "MLXD_LOG__FILE"):
        assert variables[name].startswith(job["WorkingDirectory"]), name


def installed(variant: str, **variables: str) -> dict[str, Any]:
    """The property list as the instructions have a shell make it of the shipped one."""
    blocks = re.findall(r"```sh\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if f"/{variant}/io.github.mlxd.plist" in block)
    (edit,) = re.findall(r"sed \".*?\"", block)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{edit} {FOLDER / variant / 'io.github.mlxd.plist'}"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        check=True,
    )
    job: dict[str, Any] = plistlib.loads(done.stdout)
    return job


def test_the_instructions_put_a_home_in_that_is_not_named_as_its_account() -> None:
    """A home may lie anywhere; an agent needs no account."""
    job = installed("agent", HOME="/Volumes/Data/homes/alice")

    assert "/Users/me" not in str(job)
    assert job["ProgramArguments"][0] == "/Volumes/Data/homes/alice/mlxd/.venv/bin/mlxd"
    assert "UserName" not in job


def test_the_instructions_use_one_account_for_the_daemon_and_its_folders() -> None:
    """Folders of another one could not be written."""
    told = (FOLDER / "README.md").read_text()

    assert installed("daemon", ACCOUNT="alice")["UserName"] == "alice"
    assert set(re.findall(r"install .*?-o (\S+)", told)) == {'"$ACCOUNT"'}
    assert re.findall(r"^ACCOUNT=", told, re.MULTILINE)


def test_the_instructions_make_every_folder() -> None:
    """launchd makes none."""
    told = (FOLDER / "README.md").read_text()
    variables = described(DAEMON)["EnvironmentVariables"]

    folders = [variables["TMPDIR"], variables["MLXD_SERVER__CACHE_DIR"]]
    for folder in (*folders, str(Path(variables["MLXD_LOG__FILE"]).parent)):
        assert f" {folder}" in told, folder
