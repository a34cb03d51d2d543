"""Changes that operators begin: made to their end, whoever asked has left or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from mlxd.config import ModelSettings
from mlxd.errors import ConfigError, Conflict, Draining
from tests.daemon.fakes import eventually, is_running
from tests.daemon.process import Place
from tests.daemon.test_supervisor import House, found, gated, loading, running, streaming


async def abandoned(change: Awaitable[object]) -> None:
    """Begin a change, and leave as a client does that goes away."""
    task = asyncio.ensure_future(change)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_unload_goes_on_when_its_client_leaves(
    tmp_path: Path, model: ModelSettings, gate: Path
):
    """It has closed the model already: half an unload would serve nobody, and free nothing."""
    house = House(tmp_path, a=gated(model, gate))

    async with running(house) as supervisor:
        pid = house.pid("a")
        async with streaming(supervisor, "a"):
            await abandoned(supervisor.unload("a"))
            assert is_running(pid)
            with pytest.raises(Draining):
                found(supervisor, "a")
            gate.touch()
        await eventually(lambda: not is_running(pid))
        assert house.state("a") == "stopped"


async def test_an_operator_whose_connection_breaks_has_begun_what_is_finished(tmp_path: Path):
    """Over HTTP: a handler ends with its client, the change does not."""
    place = Place(tmp_path)
    place.write(env=f'FAKE_GATE = "{place.gate}"')
    async with place.serving() as daemon:
        stream = await daemon.stream(20)
        call = daemon.client.post(
            f"{daemon.base}/admin/models/tiny/unload", timeout=aiohttp.ClientTimeout(0.2)
        )
        with pytest.raises(TimeoutError):
            await call
        await daemon.logged("nobody waits for this change any more; it goes on")
        place.gate.touch()

        assert '"finish_reason":"length"' in await stream.text()
        await daemon.logged("model unloaded")


async def test_a_reload_goes_on_when_its_client_leaves(
    tmp_path: Path, model: ModelSettings, gate: Path
):
    """What was built for it serves, and the log tells."""
    house = House(tmp_path, a=model)

    async with running(house) as supervisor:
        house.write(a=model, b=loading(model, str(gate)))
        with capture_logs() as lines:
            await abandoned(supervisor.reload(dry_run=False))
            gate.touch()
            await eventually(lambda: "b" in supervisor.model_ids())

        assert {"nobody waits for this change any more; it goes on", "reloaded"} <= {
            line["event"] for line in lines
        }


async def test_the_failure_of_a_change_without_a_client_is_told(
    tmp_path: Path, model: ModelSettings, gate: Path
):
    """In the log, where an operator who lost the connection looks."""
    gate.touch()
    house = House(tmp_path, a=loading(model, str(gate)))

    async with running(house) as supervisor:
        pid = house.pid("a")
        gate.unlink()
        with capture_logs() as lines:
            await abandoned(supervisor.restart("a"))
            await house.stop()

        (told,) = (line for line in lines if line["event"] == "the change failed")
        assert (told["change"], told["reason"]) == ("restart", "the daemon is stopping")
        assert not is_running(pid)


async def test_an_unload_ends_a_load(tmp_path: Path, model: ModelSettings, gate: Path):
    """It does not wait for what may take for ever, and whoever asked for the load is told."""
    gate.touch()
    house = House(tmp_path, a=loading(model, str(gate)))

    async with running(house) as supervisor:
        await supervisor.unload("a")
        gate.unlink()
        asked = asyncio.create_task(supervisor.load("a"))
        await house.until("a", "starting")

        assert (await asyncio.wait_for(supervisor.unload("a"), 5)).state == "stopped"
        with pytest.raises(Conflict, match="stopped while it loaded"):
            await asked


async def test_a_load_that_fails_says_why(tmp_path: Path, model: ModelSettings):
    """As an error, so that a script need not read a status to see it."""
    house = House(tmp_path, a=loading(model, "fail"))

    async with running(house) as supervisor:
        with pytest.raises(ConfigError) as caught:
            await supervisor.load("a")

        assert caught.value.problems == ["models.a: there are no weights in it"]
        assert house.state("a") == "failed"
        assert house.models_in_metrics() == {"a"}


async def test_a_model_that_is_loaded_anew_takes_no_readiness_away(
    tmp_path: Path, model: ModelSettings, gate: Path
):
    """Every model was ready once: from then on the daemon is while one of them serves."""
    gate.touch()
    house = House(tmp_path, a=loading(model, str(gate)), b=model)

    async with running(house) as supervisor:
        gate.unlink()
        await supervisor.unload("a")
        asked = asyncio.create_task(supervisor.load("a"))
        await house.until("a", "starting")

        assert supervisor.ready()
        assert not supervisor.ready("a")
        gate.touch()
        assert (await asked).state == "ready"
