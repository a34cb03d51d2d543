"""A real daemon under a load that never rests: `make soak` for long, here for some seconds."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxd.bench.startup import resident_bytes
from tests.e2e.conftest import daemon

#: How long the load lasts; set by `make soak`.
SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
RELOADS_EVERY = min(60.0, SECONDS / 4)
LOOKS_EVERY = min(5.0, SECONDS / 12)
CLIENTS = 12
#: Shares of the requests that go serial, and that are given up by their clients.
SERIAL, LEAVING = 0.15, 0.2
#: Seconds after whose first third caches are full, shapes compiled and the allocator's pages had.
SETTLED = 300.0
#: What resident memory may differ by between the second third and the last: an allocator's slack.
SLACK_SHARE, SLACK_BYTES = 0.05, 24 * 2**20
LANES = ("batch", "serial")
#: Columns of what is printed.
FIGURES = ("daemon_bytes", "engine_bytes", "daemon_files", "engine_files")

TABLES = """
[models.starter]
source = "{source}"
context = 1024
[models.starter.policy]
logit_bias = "serial"
[models.starter.batch]
width = {width}
pacing = "{pacing}"
prefix_cache = "32MiB"
"""
LISTEN = '[server]\nlisten = "127.0.0.1:0"\n[log]\nformat = "json"\n'


@dataclass
class Soak:
    """Clients that ask until the time is up, and what was seen meanwhile."""

    session: aiohttp.ClientSession
    until: float
    chance: random.Random
    told: Counter[str] = field(default_factory=Counter)
    looks: list[dict[str, float]] = field(default_factory=list)

    async def client(self) -> None:
        """One request after the other."""
        while time.monotonic() < self.until:
            self.told[await self.ask()] += 1

    async def ask(self) -> str:
        """One request, read to its end or given up: how it ended for its client."""
        words = " ".join(self.chance.choices(("sea", "wind", "stone", "light"), k=20))
        body: dict[str, Any] = {
            "model": "starter",
            "prompt": words * self.chance.choice((1, 1, 4)),
            "max_tokens": self.chance.randint(1, 40),
            "temperature": self.chance.choice((0.0, 0.8)),
            "stream": self.chance.random() < 0.8,
        }
        if self.chance.random() < SERIAL:
            body["logit_bias"] = {"5": 1.0}
        leaves = self.chance.random() < LEAVING
        # Late enough for the daemon to have it, early enough for some to wait still.
        patience = self.chance.uniform(0.2, 2.0) if leaves else None
        try:
            async with (
                asyncio.timeout(patience),
                self.session.post("/v1/completions", json=body) as answer,
            ):
                text = await answer.text()
                assert answer.status == 200, text
                assert '"error"' not in text
        except TimeoutError:
            return "left"
        return "served"

    async def look(self) -> None:
        """Note what the processes hold, again and again."""
        while time.monotonic() < self.until:
            self.looks.append(await held(self.session))
            await asyncio.sleep(LOOKS_EVERY)

    async def reload(self, config: Path, files: Iterator[str]) -> None:
        """Change what can be changed live."""
        while time.monotonic() + RELOADS_EVERY < self.until:
            await asyncio.sleep(RELOADS_EVERY)
            config.write_text(next(files))
            async with self.session.post("/admin/reload") as answer:
                assert answer.status == 200, await answer.text()
                plan = (await answer.json())["plan"]
            assert "starter" in plan["retune"], plan
            self.told["reloads"] += 1


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
@pytest.mark.timeout(SECONDS + 300)
async def test_a_load_that_never_rests_leaks_nothing(starter_path: Path, tmp_path: Path) -> None:
    """Both lanes, clients that leave, reloads: slots, places, files and memory all come back,
    and every request is in the metrics once.
    """
    tables = [
        TABLES.format(source=starter_path, width=width, pacing=pacing)
        for width, pacing in ((4, "balanced"), (8, "latency"), (6, "throughput"))
    ]
    timeout = aiohttp.ClientTimeout(total=240)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with daemon(tmp_path, tables[0]) as base:
        async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as session:
            quiet = await held(session)
            chance = random.Random(1)  # noqa: S311 - repeatable
            soak = Soak(session, time.monotonic() + SECONDS, chance)
            async with asyncio.TaskGroup() as work:
                for _ in range(CLIENTS):
                    work.create_task(soak.client())
                work.create_task(soak.look())
                files = (LISTEN + tables[number % len(tables)] for number in range(1, sys.maxsize))
                work.create_task(soak.reload(tmp_path / "mlxd.toml", files))
            await at_rest(session)
            after = await held(session)
            ended = await outcomes(session)
    tell(soak, quiet, after, ended)
    assert soak.told["left"] > 0
    assert ended.total() == soak.told["served"] + soak.told["left"]
    # A client that leaves just as its answer ends was served for all that the daemon knows.
    assert ended["stop"] + ended["length"] >= soak.told["served"]
    assert set(ended) <= {"stop", "length", "cancelled"}
    for files_of in ("daemon_files", "engine_files"):
        assert after[files_of] <= quiet[files_of]
    for process in ("daemon_bytes", "engine_bytes") if SECONDS >= SETTLED else ():
        middle, last = thirds(soak.looks, process)
        assert last <= middle * (1 + SLACK_SHARE) + SLACK_BYTES


def thirds(looks: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Medians of the second third of a series and of the last."""
    values = [look[name] for look in looks]
    third = len(values) // 3
    return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])


async def held(session: aiohttp.ClientSession) -> dict[str, float]:
    """Bytes in memory and open files of the daemon and of its engine."""
    series = await metrics(session)
    pid = (await status(session))["engine"]["pid"]
    return {
        "daemon_bytes": series["process_resident_memory_bytes"],
        "engine_bytes": resident_bytes(pid),
        "daemon_files": series["process_open_fds"],
        "engine_files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


async def status(session: aiohttp.ClientSession) -> dict[str, Any]:
    """The one model's entry in the daemon's status."""
    async with session.get("/admin/status") as answer:
        model: dict[str, Any] = (await answer.json())["models"][0]
        return model


async def at_rest(session: aiohttp.ClientSession) -> None:
    """Wait until no slot and no place in the line is taken, nor a row's bytes."""
    none = dict.fromkeys(LANES, 0)
    async with asyncio.timeout(30):
        while True:
            model = await status(session)
            if model["running"] == model["waiting"] == none and model["kv_bytes"] == 0:
                return
            await asyncio.sleep(0.1)


async def outcomes(session: aiohttp.ClientSession) -> Counter[str]:
    """How requests ended, by the metrics, without the zeros."""
    found: Counter[str] = Counter()
    for name, value in (await metrics(session)).items():
        if name.startswith("mlxd_requests_total{"):
            found[name.split('outcome="')[1].split('"')[0]] += int(value)
    return +found


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """Every series with its value."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def tell(soak: Soak, quiet: dict[str, float], after: dict[str, float], ended: Counter[str]) -> None:
    """Print what was seen; pytest shows it with `-s`, or where the test fails."""
    print(f"\n{SECONDS:.0f} s: clients {dict(soak.told)}, metrics {dict(ended)}")
    for name in FIGURES:
        middle, last = thirds(soak.looks, name)
        scale, unit = (2**20, " MiB") if name.endswith("bytes") else (1, "")
        values = (quiet[name], middle, last, after[name])
        spelled = " -> ".join(f"{value / scale:.0f}{unit}" for value in values)
        print(f"{name}: before -> second third -> last third -> after: {spelled}")
