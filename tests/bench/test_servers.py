"""Servers under measurement are started, waited for, and always stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import aiohttp
import pytest

from mlxd import config
from mlxd.bench import servers
from mlxd.bench.load import RequestFailed
from mlxd.bench.servers import HOST, Launch, ServerFailed
from mlxd.bench.startup import resident_bytes


def launch(*command: str, port: int) -> Launch:
    """A server that is not one of models."""
    return Launch("fake", command, os.environ, port, "/", "m")


def file_server() -> Launch:
    """A server that answers 200 at its root."""
    port = servers.free_port()
    command = (sys.executable, "-m", "http.server", "--bind", HOST, str(port))
    return launch(*command, port=port)


async def test_a_server_is_ready_inside_and_gone_behind(tmp_path: Path) -> None:
    """It answers inside the context, and its process has ended behind it."""
    fake = file_server()
    async with (
        aiohttp.ClientSession() as session,
        servers.ready(fake, tmp_path, session) as server,
        session.get(fake.url) as response,
    ):
        assert response.status == 200
    assert server.process.returncode is not None


async def test_a_server_is_stopped_when_a_request_failed(tmp_path: Path) -> None:
    """The failure comes through, and no process is left."""
    with pytest.raises(RequestFailed, match="status 404"):
        async with (
            aiohttp.ClientSession() as session,
            servers.ready(file_server(), tmp_path, session) as server,
        ):
            raise RequestFailed("status 404")
    assert server.process.returncode is not None


async def test_a_server_that_ends_at_once_fails_with_its_last_words(tmp_path: Path) -> None:
    """What it printed is the reason."""
    fake = launch(sys.executable, "-c", "raise SystemExit('no such model')", port=1)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ServerFailed, match="no such model"):
            async with servers.ready(fake, tmp_path, session):
                pass


def test_the_daemon_gets_a_file_that_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the model and the width, and the user's own settings do not get in."""
    monkeypatch.setenv("MLXD_DEFAULTS__BATCH__WIDTH", "3")
    folder = tmp_path / 'a "model"'
    made = servers.mlxd(folder, tmp_path)
    settings = config.load(Path(made.command[-1]), made.environment)
    assert settings.models[made.model].source == str(folder)
    assert settings.models[made.model].batch.width == servers.WIDTH
    assert settings.server.listen == f"{HOST}:{made.port}"


def test_what_a_scenario_needs_is_in_the_file(tmp_path: Path) -> None:
    """Settings of the batch, and callers with keys, which only their files know."""
    needs = servers.Needs('pacing = "latency"', keys=("calm-key", "flood-key"))
    made = servers.mlxd(tmp_path, tmp_path, needs)
    settings = config.load(Path(made.command[-1]), made.environment)
    assert settings.models[made.model].batch.pacing == "latency"
    assert settings.server.api_keys_file is not None
    assert settings.server.api_keys_file.find("flood-key") is not None
    assert made.token is not None


def test_both_servers_get_the_same_model_and_width(tmp_path: Path) -> None:
    """The width of the one is the concurrency of the other."""
    command = list(servers.mlx_lm(tmp_path, tmp_path).command)
    assert command[command.index("--model") + 1] == str(tmp_path)
    assert command[command.index("--decode-concurrency") + 1] == str(servers.WIDTH)


def test_resident_memory_is_in_bytes() -> None:
    """This process has more than ten and less than ten thousand mebibytes."""
    assert 10 * 2**20 < resident_bytes(os.getpid()) < 10_000 * 2**20
