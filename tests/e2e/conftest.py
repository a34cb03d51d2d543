"""One real daemon on the real starter model, for the tests of this folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

READY_WITHIN = 300


@pytest.fixture(scope="package")
def base(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a daemon that is ready; it must end with status 0 when asked to."""
    models = (
        f'[models.starter]\nsource = "{starter_path}"\naliases = ["default"]\ncontext = 2048\n'
        # What the tests send to have the serial lane.
        '[models.starter.policy]\nlogit_bias = "serial"\n'
    )
    with daemon(tmp_path_factory.mktemp("e2e"), models) as url:
        yield url


@contextmanager
def daemon(folder: Path, models: str) -> Iterator[str]:
    """A daemon that serves these tables, ready, on a port of the system; its base URL.

    When the context exits it is asked to end, and must do so with status 0.
    """
    config = folder / "mlxd.toml"
    config.write_text(f'[server]\nlisten = "127.0.0.1:0"\n[log]\nformat = "json"\n{models}')
    command = [sys.executable, "-m", "mlxd", "serve", "--config", str(config)]
    log = (folder / "log").open("w+")
    with log, subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL) as process:
        try:
            url = f"http://{_address(Path(log.name), process)}"
            _wait_until_ready(url, process)
            yield url
            process.terminate()
            assert process.wait(timeout=60) == 0, Path(log.name).read_text()
        finally:
            process.kill()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """The address that the daemon logged when it was bound."""
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "listening":
                return str(entry["address"])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/readyz").close()  # noqa: S310  # our own daemon
        except urllib.error.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the daemon did not become ready")
