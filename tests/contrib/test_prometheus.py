"""The real Prometheus and its tool read what mlxd exposes and what contrib/ ships."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contrib import queries
from tests.daemon.fakes import eventually
from tests.daemon.process import Daemon, Place

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="there is no Prometheus here (Debian: apt-get install prometheus)",
)


def promtool(*arguments: str, text: str | None = None) -> tuple[int, str]:
    """Its exit status, and everything that it says."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=text, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A model whose requests with a seed go to the serial lane."""
    place = Place(tmp_path)
    place.write(more='[models.tiny.policy]\nseed = "serial"\nlogprobs = "reject"')
    return place


async def ask(daemon: Daemon) -> None:
    """A few requests, for every lane and to several ends."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 8}
    bodies = [body, body, body | {"seed": 1}, body | {"logprobs": 1}]
    answers = [daemon.client.post(f"{daemon.base}/v1/completions", json=each) for each in bodies]
    for answer in await asyncio.gather(*answers):
        await answer.read()


class Prometheus:
    """A server that scrapes one daemon."""

    def __init__(self, base: str, client: aiohttp.ClientSession) -> None:
        self._base = base
        self._client = client

    async def get(self, path: str, **parameters: str) -> Any:
        """An answer of its API; fails where it is an error."""
        async with self._client.get(f"{self._base}/api/v1/{path}", params=parameters) as answer:
            body = await answer.json()
        assert body["status"] == "success", body
        return body["data"]

    async def ready(self) -> bool:
        """Whether it answers queries yet."""
        async with self._client.get(f"{self._base}/-/ready") as answer:
            return answer.status == 200

    async def gives(self, expression: str) -> bool:
        """Whether a query gives any sample now."""
        return bool((await self.get("query", query=expression))["result"])


@asynccontextmanager
async def prometheus(daemon: Daemon, folder: Path) -> AsyncIterator[Prometheus]:
    """The shipped configuration, but for the address and a shorter interval."""
    target = daemon.base.removeprefix("http://")
    config = queries.CONFIG.read_text().replace("127.0.0.1:8080", target).replace("15s", "250ms")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(queries.RULES, folder)
    assert PROMETHEUS is not None
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=PIPE,
    )
    try:
        address = await asyncio.wait_for(listening(process), 30)
        server = Prometheus(f"http://{address}", daemon.client)
        await eventually(server.ready, within=30)
        yield server
    finally:
        process.kill()
        await process.wait()


async def listening(process: Process) -> str:
    """The address that it has chosen."""
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb'msg="Listening on" address=(\S+)', line):
            return found[1].decode()
    raise AssertionError("Prometheus has ended")


def test_the_rules_pass_their_tests() -> None:
    """promtool finds them valid, and each fires when it should and only then."""
    for command in (("check", "rules", queries.RULES), ("test", "rules", queries.RULE_TESTS)):
        status, said = promtool(*map(str, command))
        assert status == 0, said
    alerts = re.findall(r"- alert: (\w+)", queries.RULES.read_text())
    fired = re.findall(
        r"alertname: (\w+)\n\s+exp_alerts:\n\s+- exp_labels", queries.RULE_TESTS.read_text()
    )
    assert set(alerts) == set(fired)


def test_the_configuration_is_valid() -> None:
    """Including the rules that it names."""
    status, said = promtool("check", "config", str(queries.CONFIG))

    assert status == 0, said


async def test_the_exposition_is_as_it_should_be(place: Place) -> None:
    """The tool has nothing to say but that vLLM's names have a colon in them."""
    async with place.serving() as daemon:
        await ask(daemon)
        async with daemon.client.get(f"{daemon.base}/metrics") as answer:
            text = await answer.text()
            kind = answer.headers["Content-Type"]

    _, said = promtool("check", "metrics", text=text)
    assert kind.startswith("text/plain; version=")
    complaints = {line for line in said.splitlines() if line.strip()}
    assert complaints
    assert all(
        re.fullmatch(r"vllm:\w+ metric names should not contain ':'", line) for line in complaints
    ), complaints


async def test_every_query_and_every_rule_gives_data(place: Place, tmp_path: Path) -> None:
    """Of mlxd's dashboard, of its rules, and of vLLM's own dashboard, on a daemon with load."""
    async with place.serving() as daemon, prometheus(daemon, tmp_path) as server:

        async def load_up() -> bool:
            groups = (await server.get("rules"))["groups"]
            return bool(groups) and all(rule["health"] == "ok" for rule in groups[0]["rules"])

        await eventually(load_up, within=30)
        (group,) = (await server.get("rules"))["groups"]
        rules = [queries.of_rule(rule) for rule in group["rules"]]
        assert len(rules) == 14
        missing = {*queries.of_dashboard(), *queries.of_vllms_dashboard("tiny"), *rules}

        async def all_answered() -> bool:
            await ask(daemon)
            for expression in sorted(missing):
                if await server.gives(expression):
                    missing.discard(expression)
            return not missing

        try:
            await eventually(all_answered, within=40)
        except TimeoutError:
            pytest.fail("\n".join(["no data:", *sorted(missing)]))
