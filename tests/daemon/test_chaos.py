"""Three models under load while engines die, hang, drain, reload and come back.

Every request gets exactly one answer, and what clients were told is what was counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

import pytest

from mlxd.config import BatchSettings, ModelSettings, PolicySettings
from mlxd.errors import Conflict, Draining, EngineFailed, Unavailable
from mlxd.wire import Lane
from tests.daemon.fakes import eventually, generation
from tests.daemon.light import model_folder
from tests.daemon.test_supervisor import House, running

MODELS = ("a", "b", "c")
CLIENTS = 5  # of each model: some run, some wait
KILLS = 20
CHANGES = 12


@dataclass
class Crowd:
    """Clients that ask without end, and what each was told."""

    house: House
    chance: random.Random
    told: dict[str, Counter[str]] = field(default_factory=lambda: {m: Counter() for m in MODELS})
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, model: str) -> None:
        """One request after the other."""
        while not self.done.is_set():
            self.told[model][await self.ask(model)] += 1

    async def ask(self, model: str) -> str:
        """One request; how it ended, as the metrics name it."""
        asked = generation(
            max_tokens=self.chance.randint(1, 30),
            traits=("seed",) if self.chance.random() < 0.2 else (),
        )
        async with AsyncExitStack() as place:
            try:
                with self.house.supervisor.using(model) as served:
                    ticket = await place.enter_async_context(served.gateway.admit(asked))
            except Unavailable:
                await asyncio.sleep(0.002)  # as a client that may ask again
                return "rejected"
            patience = self.chance.choice((1, None, None, None, None))
            tokens: list[int] = []
            try:
                async for batch in ticket:
                    tokens += [token.token for token in batch]
                    if patience is not None:
                        break
            except (EngineFailed, Draining):
                pass
        # In order, none twice and none of another's, also for those that were run again.
        assert tokens == list(islice((ord("a") + n % 26 for n in count()), len(tokens)))
        outcome = ticket.outcome
        assert outcome.name != "length" or len(tokens) == asked.max_tokens
        return outcome.name

    async def is_served(self, model: str) -> None:
        """Wait until the model has finished one more request."""
        before = self.told[model]["length"]
        await eventually(lambda: self.told[model]["length"] > before)

    def counted(self, model: str) -> Counter[str]:
        """How requests ended, by the metrics, without the zeros."""
        found: Counter[str] = Counter()
        for lane in (*Lane, "none"):
            for outcome in ("length", "cancelled", "error", "drained", "rejected"):
                labels = {"model": model, "lane": lane, "outcome": outcome}
                value = self.house.registry.get_sample_value("mlxd_requests_total", labels)
                found[outcome] += int(value or 0)
        return +found


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Three models with both lanes, whose phases may take a second and a half."""
    model = ModelSettings(
        source=str(model_folder(tmp_path)),
        batch=BatchSettings(width=2, queue=64),
        policy=PolicySettings(seed="serial"),
        env={"FAKE_BUDGET": "1.5"},
    )
    return House(tmp_path, drain_timeout=0.2, a=model, b=model, c=model)


@asynccontextmanager
async def crowded(house: House, seed: int) -> AsyncIterator[Crowd]:
    """Load on every model; afterwards nothing is left, and the accounts agree."""
    crowd = Crowd(house, random.Random(seed))  # noqa: S311 - repeatable
    async with running(house) as supervisor:
        async with asyncio.TaskGroup() as clients:
            for model in MODELS * CLIENTS:
                clients.create_task(crowd.client(model))
            try:
                yield crowd
            finally:
                crowd.done.set()
        assert supervisor.requests() == []
        for model in MODELS:
            assert crowd.told[model]["length"] > 0
            assert crowd.counted(model) == +crowd.told[model]


async def test_twenty_kills_lose_no_request_and_reach_no_other_model(house: House):
    """One engine after the other is killed under load; it is ready again each time, and only
    its own streams saw an error.
    """
    killed: Counter[str] = Counter()
    async with crowded(house, seed=1) as crowd:
        for _ in range(KILLS):
            model = crowd.chance.choice(MODELS[:2])
            before = house.pid(model)
            await crowd.is_served(model)  # so that its deaths are not in a row
            os.kill(before, crowd.chance.choice((signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)))
            killed[model] += 1
            await house.until(model, "starting")
            await house.until(model, "ready")
            assert house.pid(model) != before

    for model in MODELS:
        assert house.count("engine_restarts", model) == killed[model]
    assert crowd.told["a"]["error"] + crowd.told["b"]["error"] > 0
    assert set(crowd.told["c"]) <= {"length", "cancelled"}


@pytest.mark.parametrize("seed", [2, 3])
async def test_whatever_operators_and_engines_do_the_accounts_agree(house: House, seed: int):
    """Kills, hangs, drains, live changes, reloads, restarts, unloads and loads, in any order and
    some at the same time.
    """
    async with crowded(house, seed) as crowd:
        for number in range(CHANGES):
            model = crowd.chance.choice(MODELS)
            await crowd.is_served(model)
            changes = crowd.chance.sample(CHAOS, k=1 + number % 2)
            await asyncio.gather(*(change(house, model) for change in changes))
        for model in MODELS:
            await crowd.is_served(model)


async def kill(house: House, model: str) -> None:
    """The engine dies."""
    os.kill(house.pid(model), signal.SIGKILL)


async def hang(house: House, model: str) -> None:
    """The engine stops, and the watchdog has to find it."""
    pid = house.pid(model)
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: house.state(model) != "ready" or house.pid(model) != pid)


async def drain(house: House, model: str) -> None:
    """A drain that is undone, finished or not, or undone already by another's change."""
    with suppress(Conflict):
        await house.supervisor.drain(model, timeout=0.05, wait=True)
    house.supervisor.resume(model)


async def retune(house: House, model: str) -> None:
    """A live change."""
    width = 1 + house.supervisor.config().etag.count("a") % 4
    await house.supervisor.patch(model, "batch", {"width": width}, None)


async def replace(house: House, model: str) -> None:
    """A reload that gives the model a new engine."""
    models = dict(house.supervisor.settings.models)
    context = (models[model].context or 1000) + 1
    house.write(**models | {model: models[model].model_copy(update={"context": context})})
    await house.supervisor.reload(dry_run=False)


async def restart(house: House, model: str) -> None:
    """An operator asks for a new engine."""
    await house.supervisor.restart(model)


async def unload(house: House, model: str) -> None:
    """The model goes, cutting what runs, and comes back, by another's change perhaps."""
    await house.supervisor.unload(model)
    with suppress(Conflict):
        await house.supervisor.load(model)


Change = Callable[[House, str], Awaitable[None]]
CHAOS: list[Change] = [kill, hang, drain, retune, replace, restart, unload]
