"""Models coming, changing, failing and going, on fake engine processes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from mlxd.config import (
    BatchSettings,
    ModelSettings,
    PolicySettings,
    SamplingSettings,
    ServerSettings,
    Settings,
)
from mlxd.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    Draining,
    EngineFailed,
    ModelNotReady,
    NotFound,
    PreconditionFailed,
    Withdrawn,
)
from mlxd.host.fetcher import Fetcher
from mlxd.host.run import Means
from mlxd.memory import MemoryBudget
from mlxd.metrics import Metrics
from mlxd.serving import Identity, Served
from mlxd.supervisor import Supervisor
from mlxd.wire import Lane
from tests.daemon.fake_engine import WEIGHTS
from tests.daemon.fakes import eventually, generation, is_running, read
from tests.daemon.light import (
    ENGINE_COMMAND,
    QUICK_RESTARTS,
    QUICK_WATCH,
    load_byte_tokenizer,
    model_folder,
)

GAUGES = ("running_rows", "waiting_requests")


class House:
    """A supervisor, the file that it reads, and its metrics."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        drain_timeout: float = 5.0,
        memory: int | None = None,
        **models: ModelSettings,
    ):
        self.server = ServerSettings(drain_timeout=drain_timeout)
        self.file: Settings | ConfigError = Settings(server=self.server, models=models)
        self.in_force: list[Settings] = []
        self.registry = CollectorRegistry()
        means = Means(
            engine_command=ENGINE_COMMAND,
            environment=os.environ,
            cache=tmp_path / "cache",
            locate=Fetcher(tmp_path / "cache").locate,
            load_tokenizer=load_byte_tokenizer,
            metrics=Metrics(self.registry),
            restarts=QUICK_RESTARTS,
            watch=QUICK_WATCH,
            memory=MemoryBudget(memory),
        )
        self.supervisor = Supervisor(self.file, means, self.read, self.in_force.append)

    def read(self) -> Settings:
        """As the daemon reads its file."""
        if isinstance(self.file, ConfigError):
            raise self.file
        return self.file

    async def stop(self) -> None:
        """As at SIGTERM, with nobody who reads slowly."""

        async def delivered() -> None:
            return

        await self.supervisor.stop(delivered)

    def write(self, **models: ModelSettings) -> None:
        """Another file; not read yet."""
        self.file = Settings(server=self.server, models=models)

    def state(self, model: str) -> str:
        """As the status says."""
        return {m.id: m.state for m in self.supervisor.status().models}[model]

    def pid(self, model: str) -> int:
        """Of the model's engine."""
        engines = {m.id: m.engine for m in self.supervisor.status().models}
        engine = engines[model]
        assert engine is not None
        return engine.pid

    def models_in_metrics(self) -> set[str]:
        """Models that have series."""
        return {
            sample.labels["model"]
            for family in self.registry.collect()
            for sample in family.samples
            if "model" in sample.labels
        }

    def count(self, name: str, model: str) -> float | None:
        """A counter of one model."""
        return self.registry.get_sample_value(f"mlxd_{name}_total", {"model": model})

    def reloads(self) -> dict[str, float | None]:
        """Reloads by result."""
        return {
            result: self.registry.get_sample_value("mlxd_reloads_total", {"result": result})
            for result in ("success", "failure")
        }

    async def until(self, model: str, *states: str) -> None:
        """Wait until a model is in one of these states."""
        await eventually(lambda: self.state(model) in states)


def gated(model: ModelSettings, gate: Path) -> ModelSettings:
    """The same model behind the gate."""
    return model.model_copy(update={"env": {"FAKE_GATE": str(gate)}})


def loading(model: ModelSettings, how: str) -> ModelSettings:
    """The same model, loading in this way."""
    return model.model_copy(update={"env": {"FAKE_LOAD": how}})


@asynccontextmanager
async def running(house: House) -> AsyncIterator[Supervisor]:
    """The supervisor from its start to its end, its models ready or failed."""
    house.supervisor.start()
    try:
        for status in house.supervisor.status().models:
            await house.until(status.id, "ready", "draining", "failed")
        yield house.supervisor
    finally:
        await house.stop()


def found(supervisor: Supervisor, model: str) -> Served:
    """What a request finds under this name."""
    with supervisor.using(model) as served:
        return served


async def late(supervisor: Supervisor, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """A request to model a that is admitted only after something else has happened."""
    with supervisor.using("a") as served:
        await meanwhile()
        async with served.gateway.admit(generation()):
            pass


async def ask(supervisor: Supervisor, model: str, prompt: str = "hi", **changes: Any) -> list[int]:
    """One whole request."""
    gateway = found(supervisor, model).gateway
    async with gateway.admit(generation(prompt=list(prompt.encode()), **changes)) as ticket:
        return await read(ticket)


@asynccontextmanager
async def streaming(supervisor: Supervisor, model: str, prompt: str = "hi"):
    """A request that has its first tokens."""
    gateway = found(supervisor, model).gateway
    async with gateway.admit(generation(prompt=list(prompt.encode()))) as ticket:
        await anext(aiter(ticket))
        yield ticket


class TestLife:
    async def test_models_load_side_by_side_and_serve(self, tmp_path: Path, model: ModelSettings):
        """Each model gets its own engine; ids and aliases both name it."""
        house = House(tmp_path, a=model, b=model.model_copy(update={"aliases": ("default",)}))

        async with running(house) as supervisor:
            assert supervisor.ready()
            assert supervisor.model_ids() == ["a", "b"]
            assert found(supervisor, "default").id == "b"
            assert house.pid("a") != house.pid("b")
            assert len(await ask(supervisor, "a")) == 100
            with pytest.raises(NotFound):
                found(supervisor, "/etc/passwd")

    async def test_engines_have_a_private_lasting_tmpdir(
        self, tmp_path: Path, model: ModelSettings
    ):
        """What MLX compiles for one model is kept for it, and only for it."""
        async with running(House(tmp_path, a=model)):
            folder = tmp_path / "cache" / "engines" / "a" / "1"

            assert folder.is_dir()
            assert folder.stat().st_mode & 0o077 == 0

    async def test_names_are_known_in_every_state(self, tmp_path: Path, model: ModelSettings):
        """A model that has failed is still called by its id, also when it is asked by an alias."""
        failing = loading(model, "fail").model_copy(update={"aliases": ("org/name",)})

        async with running(House(tmp_path, a=failing)) as supervisor:
            identity = supervisor.identify("org/name")

            assert (identity.id, supervisor.identify("a")) == ("a", identity)
            assert isinstance(identity, Identity)
            with pytest.raises(NotFound):
                supervisor.identify("b")

    async def test_refusals_are_counted_once_whoever_refuses(
        self, tmp_path: Path, model: ModelSettings
    ):
        """In any state, by any check: one domain error on the way to admission, one rejection."""
        house = House(tmp_path, a=model, bad=loading(model, "fail"))

        def rejected(name: str) -> float | None:
            labels = {"model": name, "lane": "none", "outcome": "rejected"}
            return house.registry.get_sample_value("mlxd_requests_total", labels)

        async with running(house) as supervisor:
            with pytest.raises(ModelNotReady):
                found(supervisor, "bad")
            with pytest.raises(BadRequest), supervisor.using("a"):
                raise BadRequest("too long")
            with pytest.raises(Draining):
                await late(supervisor, lambda: supervisor.drain("a", timeout=1, wait=True))
            with pytest.raises(Draining):
                found(supervisor, "a")

            assert (rejected("a"), rejected("bad")) == (3, 1)

    async def test_not_ready_before_every_model_was(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """While one model still loads the daemon is not ready, the loaded one serves."""
        house = House(tmp_path, a=model, slow=loading(model, str(gate)))
        house.supervisor.start()
        await house.until("a", "ready")

        assert not house.supervisor.ready()
        assert house.supervisor.ready("a")
        assert not house.supervisor.ready("slow")
        with pytest.raises(ModelNotReady) as caught:
            found(house.supervisor, "slow")
        assert caught.value.retry_after is not None
        gate.touch()
        await house.until("slow", "ready")
        assert house.supervisor.ready()
        await house.stop()

    @pytest.mark.parametrize(
        ("how", "reason"),
        [("fail", "there are no weights in it"), ("die", "SIGKILL: Segmentation fault")],
    )
    async def test_failed_load_is_the_models_own(
        self, tmp_path: Path, model: ModelSettings, how: str, reason: str
    ):
        """A model that cannot be loaded says why; the others serve."""
        house = House(tmp_path, good=model, bad=loading(model, how))

        async with running(house) as supervisor:
            statuses = {status.id: status for status in supervisor.status().models}
            assert statuses["bad"].state == "failed"
            assert reason in (statuses["bad"].reason or "")
            assert supervisor.ready("good")
            assert not supervisor.ready("bad")
            with pytest.raises(ModelNotReady, match="has failed") as told:
                found(supervisor, "bad")
            # Its words are for operators: they may name paths of this machine.
            assert reason not in told.value.message
            await ask(supervisor, "good")

    async def test_missing_folder_is_a_reason(self, tmp_path: Path):
        """A source that is not there fails its model, in the words of whoever looked."""
        absent = ModelSettings(source=str(tmp_path / "absent"))
        house = House(tmp_path, a=absent)

        async with running(house) as supervisor:
            (status,) = supervisor.status().models
            assert status.state == "failed"
            assert "absent" in (status.reason or "")

    async def test_dead_engine_fails_what_had_tokens_and_runs_the_rest_again(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Streams get an error at once, one that waited is served by the next engine, and the
        other model never notices.
        """
        house = House(tmp_path, a=gated(model, gate), b=gated(model, gate))

        async with running(house) as supervisor:
            gateway = found(supervisor, "a").gateway
            async with (
                streaming(supervisor, "a") as first,
                streaming(supervisor, "a") as second,
                gateway.admit(generation()) as third,
                streaming(supervisor, "b") as other,
            ):
                pid = house.pid("a")
                os.kill(pid, signal.SIGKILL)
                for ticket in (first, second):
                    with pytest.raises(EngineFailed):
                        await asyncio.wait_for(read(ticket), 1)
                assert house.state("a") == "starting"
                assert supervisor.ready()
                assert not supervisor.ready("a")
                with pytest.raises(ModelNotReady) as caught:
                    found(supervisor, "a")
                assert caught.value.retry_after is not None
                gate.touch()
                assert len(await read(third)) == 100
                assert third.outcome.name == "length"
                await read(other)
                assert other.outcome.name == "length"
            assert house.pid("a") != pid
            assert supervisor.ready("a")
            assert supervisor.status().models[0].restarts == 1
            assert house.count("engine_restarts", "a") == 1
            assert house.count("replays", "a") == 0  # no engine had begun it
            assert house.count("engine_restarts", "b") == 0

    async def test_request_that_ends_engines_is_run_again_once(
        self, tmp_path: Path, model: ModelSettings
    ):
        """The second engine that it takes with it is the last; those beside it are served."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            poison, *others = await asyncio.gather(
                ask(supervisor, "a", "*"),
                *(ask(supervisor, "a") for _ in range(3)),
                return_exceptions=True,
            )

            assert isinstance(poison, EngineFailed)
            assert [len(other) for other in others if isinstance(other, list)] == [100] * 3
            await house.until("a", "ready")
            assert house.count("engine_restarts", "a") == 2
            assert house.count("replays", "a") == 1
            assert len(await ask(supervisor, "a")) == 100

    async def test_engine_that_never_serves_is_given_up(self, tmp_path: Path, model: ModelSettings):
        """After its limit of restarts the model has failed, with the reason, and says so to all."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            for _ in range(QUICK_RESTARTS.limit):
                await house.until("a", "ready")
                os.kill(house.pid("a"), signal.SIGABRT)
                await house.until("a", "starting")
            await house.until("a", "ready")
            gateway = found(supervisor, "a").gateway
            async with gateway.admit(generation(prompt=[ord("*")])) as waiting:
                with pytest.raises(EngineFailed) as told:
                    await read(waiting)
            assert "SIGKILL" not in told.value.message
            await house.until("a", "failed")

            (status,) = supervisor.status().models
            assert (status.reason or "").startswith("the engine ended with SIGKILL")
            assert status.restarts == QUICK_RESTARTS.limit
            with pytest.raises(ModelNotReady, match="has failed"):
                found(supervisor, "a")

    async def test_request_that_waits_for_an_engine_can_end(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Its client may leave, and a drain's deadline cuts it, while no engine is there."""
        house = House(tmp_path, drain_timeout=0.05, a=gated(model, gate))

        async with running(house) as supervisor:
            gateway = found(supervisor, "a").gateway
            async with (
                streaming(supervisor, "a"),
                streaming(supervisor, "a"),
                gateway.admit(generation()) as waiting,
            ):
                async with gateway.admit(generation()):
                    os.kill(house.pid("a"), signal.SIGKILL)
                    await house.until("a", "starting")
                stopping = asyncio.create_task(house.stop())
                with pytest.raises(Draining):
                    await read(waiting)
            await stopping

    async def test_last_words_are_in_the_log(self, tmp_path: Path, model: ModelSettings):
        """What the engine printed before it died is told, with how it died."""
        house = House(tmp_path, a=model)

        with capture_logs() as lines:
            async with running(house) as supervisor:
                with pytest.raises(EngineFailed):
                    await ask(supervisor, "a", "!")
                await eventually(lambda: any(line["event"] == "engine died" for line in lines))

        (died,) = (line for line in lines if line["event"] == "engine died")
        assert died["reason"] == "the engine ended with SIGKILL: libc++abi: terminating"
        assert died["words"] == ("libc++abi: terminating",)

    @pytest.mark.parametrize("phase", ["load", "warmup", "prefill", "step", "serial", "idle"])
    async def test_hang_in_any_phase_is_found(
        self, tmp_path: Path, model: ModelSettings, phase: str
    ):
        """A stopped process is killed within twice its phase's budget, and its work run again."""
        env = {"FAKE_HANG": f"{phase}:{tmp_path / 'hung'}", "FAKE_BUDGET": "1"}
        policy = PolicySettings(seed="serial")
        house = House(tmp_path, a=model.model_copy(update={"env": env, "policy": policy}))

        with capture_logs() as lines:
            async with running(house) as supervisor:
                traits = ("seed",) if phase == "serial" else ()
                assert len(await ask(supervisor, "a", traits=traits)) == 100

        (died,) = (line for line in lines if line["event"] == "engine died")
        expected = (
            "handed work while idle" if phase == "idle" else f"no progress in phase '{phase}'"
        )
        assert expected in died["reason"]

    async def test_failed_step_is_the_rows_own(self, tmp_path: Path, model: ModelSettings):
        """A request whose step fails gets the error, the model goes on."""
        async with running(House(tmp_path, a=model)) as supervisor:
            with pytest.raises(EngineFailed, match="on purpose"):
                await ask(supervisor, "a", "?")

            assert len(await ask(supervisor, "a")) == 100

    async def test_lanes_take_turns_under_a_burst(self, tmp_path: Path, model: ModelSettings):
        """A serial request among batch ones and the reverse: all are answered."""
        policy = PolicySettings(seed="serial")
        batch = BatchSettings(width=2, queue=64)
        house = House(tmp_path, a=model.model_copy(update={"policy": policy, "batch": batch}))

        def lane(number: int) -> tuple[str, ...]:
            return ("seed",) if number % 3 == 0 else ()

        async with running(house) as supervisor:
            answers = await asyncio.gather(
                *(ask(supervisor, "a", traits=lane(n), max_tokens=10) for n in range(20))
            )

        assert [len(answer) for answer in answers] == [10] * 20

    async def test_traits_that_cannot_be_batched_are_told_once(
        self, tmp_path: Path, model: ModelSettings
    ):
        """A `batch` written in the file is a warning, a default is information; both go serial."""
        changes = {
            "policy": PolicySettings(penalties="batch"),
            "env": {"FAKE_BATCHABLE": "seed"},
        }
        house = House(tmp_path, a=model.model_copy(update=changes))

        with capture_logs() as lines:
            async with running(house) as supervisor:
                gateway = found(supervisor, "a").gateway
                async with gateway.admit(generation(traits=("penalties",))) as ticket:
                    assert (ticket.lane, ticket.reason) == (Lane.SERIAL, "penalties")

        told = [(line["log_level"], line["traits"]) for line in lines if "traits" in line]
        assert told == [
            ("warning", ["penalties"]),
            ("info", ["logprobs", "logit_bias", "structured", "adapter", "kv_quant"]),
        ]

    async def test_random_disconnects_leave_nothing_behind(
        self, tmp_path: Path, model: ModelSettings
    ):
        """Clients that leave after k tokens, or before any: nothing runs, nothing waits."""
        batch = BatchSettings(width=4, queue=256)
        house = House(tmp_path, a=model.model_copy(update={"batch": batch}))

        async with running(house) as supervisor:
            gateway = found(supervisor, "a").gateway

            async def leave_after(batches: int) -> None:
                async with gateway.admit(generation(max_tokens=50_000)) as ticket:
                    for _ in range(batches):
                        await anext(aiter(ticket))

            await asyncio.gather(*(leave_after(number % 7) for number in range(200)))
            answers = await asyncio.gather(*(ask(supervisor, "a") for _ in range(4)))
            await eventually(
                lambda: (
                    not (any(sum_of(house, name) for name in ("running_rows", "waiting_requests")))
                )
            )

        assert [len(answer) for answer in answers] == [100] * 4
        labels = {"model": "a", "lane": "batch"}
        ended = {
            name: house.registry.get_sample_value(
                "mlxd_requests_total", {**labels, "outcome": name}
            )
            for name in ("cancelled", "length")
        }
        assert ended == {"cancelled": 200, "length": 4}


def temporary_folder(pid: int) -> Path:
    """TMPDIR of a process."""
    for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = pair.partition(b"=")
        if name == b"TMPDIR":
            return Path(value.decode())
    raise AssertionError("it has no TMPDIR")


def is_unlocked(folder: Path) -> bool:
    """Whether no engine has this folder."""
    with (folder / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def sum_of(house: House, name: str) -> float:
    """A gauge over both lanes of model a."""
    return sum(
        house.registry.get_sample_value(f"mlxd_{name}", {"model": "a", "lane": lane}) or 0
        for lane in Lane
    )


class TestDrain:
    async def test_drain_finishes_what_was_accepted(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Nothing new, everything old, and then `drained`; `resume` admits again."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor:
            async with streaming(supervisor, "a") as ticket:
                draining = asyncio.create_task(supervisor.drain(None, timeout=5, wait=True))
                await house.until("a", "draining")
                with pytest.raises(Draining):
                    found(supervisor, "a")
                assert not supervisor.ready()
                gate.touch()
                await read(ticket)
                assert ticket.outcome.name == "length"
            assert (await draining).state == "drained"

            supervisor.resume(None)
            assert supervisor.ready()
            await ask(supervisor, "a")

    async def test_drain_never_cuts(self, tmp_path: Path, model: ModelSettings, gate: Path):
        """At its timeout it tells what runs; that goes on, and the model stays draining."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            report = await supervisor.drain("a", timeout=0.01, wait=True)

            assert report.state == "draining"
            assert (report.models["a"].running, report.models["a"].waiting) == (1, 0)
            assert house.state("a") == "draining"
            gate.touch()
            await read(ticket)
            assert ticket.outcome.name == "length"

    async def test_drain_does_not_wait_for_rows_that_were_given_up(
        self, tmp_path: Path, model: ModelSettings
    ):
        """What was cancelled a moment ago is not live, though the engine still holds its row."""
        async with running(House(tmp_path, a=model)) as supervisor:
            gateway = found(supervisor, "a").gateway
            async with gateway.admit(generation()) as ticket:
                await anext(aiter(ticket))
            # The engine has not been heard since: nothing has waited.
            report = await supervisor.drain("a", timeout=0, wait=False)

            assert report.state == "drained"
            assert (report.models["a"].running, report.models["a"].waiting) == (0, 0)

    async def test_one_drained_model_leaves_the_others(self, tmp_path: Path, model: ModelSettings):
        """The daemon stays ready as long as a model can serve."""
        async with running(House(tmp_path, a=model, b=model)) as supervisor:
            await supervisor.drain("a", timeout=1, wait=True)

            assert supervisor.ready()
            assert not supervisor.ready("a")
            await ask(supervisor, "b")
            with pytest.raises(NotFound):
                await supervisor.drain("c", timeout=1, wait=True)

    async def test_resume_during_a_drain_is_told_to_whoever_waits(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """A drain that was undone never claims that the model is drained."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor:
            async with streaming(supervisor, "a") as ticket:
                draining = asyncio.create_task(supervisor.drain(None, timeout=5, wait=True))
                await house.until("a", "draining")
                supervisor.resume(None)
                gate.touch()
                await read(ticket)

            with pytest.raises(Conflict):
                await draining

    async def test_model_drained_in_its_start_comes_up_drained(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """A drain is kept through the load."""
        house = House(tmp_path, a=loading(model, str(gate)))
        house.supervisor.start()
        await house.supervisor.drain("a", timeout=1, wait=True)
        gate.touch()

        await house.until("a", "draining")
        assert not house.supervisor.ready("a")
        await house.stop()

    async def test_stop_cuts_at_the_deadline(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Partial text and `length` for what runs, 503 for what waits, and then the end."""
        house = House(tmp_path, drain_timeout=0.05, a=gated(model, gate))

        async with running(house) as supervisor:
            gateway = found(supervisor, "a").gateway
            async with (
                streaming(supervisor, "a") as running_one,
                streaming(supervisor, "a"),
                gateway.admit(generation()) as waiting,
            ):
                stopping = asyncio.create_task(house.stop())
                await read(running_one)
                assert running_one.outcome.name == "drained"
                assert running_one.outcome.finish_reason == "length"
                with pytest.raises(Draining):
                    await read(waiting)
            await stopping
            assert house.state("a") == "stopped"

    async def test_stop_waits_for_no_loading_model(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """A model that loads for minutes does not hold the end."""
        house = House(tmp_path, a=loading(model, str(gate)))
        house.supervisor.start()
        await eventually(lambda: house.supervisor.status().models[0].engine is not None)
        pid = house.pid("a")

        async with asyncio.timeout(2):
            await house.stop()

        assert not is_running(pid)


class TestReload:
    async def test_bad_file_changes_nothing(self, tmp_path: Path, model: ModelSettings):
        """Every problem is told, the old configuration goes on."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            before = supervisor.status().config_etag
            house.file = ConfigError(["one", "two"])
            with pytest.raises(ConfigError) as caught:
                await supervisor.reload(dry_run=False)

            assert caught.value.problems == ["one", "two"]
            assert supervisor.status().config_etag == before
            assert house.reloads() == {"success": 0, "failure": 1}
            assert house.registry.get_sample_value("mlxd_config_last_reload_successful") == 0
            await ask(supervisor, "a")

    async def test_dry_run_only_tells(self, tmp_path: Path, model: ModelSettings):
        """The plan is shown, nothing happens, nothing is counted."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            house.write(a=model, b=model)
            plan = await supervisor.reload(dry_run=True)

            assert plan.add == ("b",)
            assert supervisor.model_ids() == ["a"]
            assert house.reloads() == {"success": 0, "failure": 0}

    async def test_retune_touches_no_running_request(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Width, policy and sampling change under a stream that goes on in the same engine."""
        old = gated(model, gate)
        house = House(tmp_path, a=old)

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            pid = house.pid("a")
            house.write(
                a=old.model_copy(
                    update={
                        "batch": BatchSettings(width=8),
                        "policy": PolicySettings(seed="serial"),
                        "sampling": SamplingSettings(temperature=0.5),
                    }
                )
            )
            plan = await supervisor.reload(dry_run=False)

            assert set(plan.retune) == {"a"}
            assert supervisor.status().models[0].width == 8
            assert found(supervisor, "a").sampling.temperature == 0.5
            assert house.pid("a") == pid
            gate.touch()
            await read(ticket)
            assert ticket.outcome.name == "length"
            assert house.in_force[-1] is house.file
            served = found(supervisor, "a").gateway
            async with served.admit(generation(traits=("seed",))) as next_one:
                assert next_one.lane is Lane.SERIAL

    async def test_models_come_and_go(self, tmp_path: Path, model: ModelSettings, gate: Path):
        """A new one serves when the reload returns; a removed one finishes what it runs."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor:
            async with streaming(supervisor, "a") as ticket:
                pid = house.pid("a")
                house.write(b=model)
                await supervisor.reload(dry_run=False)

                assert supervisor.model_ids() == ["b"]
                assert len(await ask(supervisor, "b")) == 100
                with pytest.raises(NotFound):
                    found(supervisor, "a")
                gate.touch()
                await read(ticket)
                assert ticket.outcome.name == "length"
            await eventually(lambda: house.models_in_metrics() == {"b"})
            assert not is_running(pid)

    async def test_replaced_model_is_cut_at_the_deadline_only(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """The new engine serves at once; the old one's request ends with what it has."""
        old = gated(model, gate)
        house = House(tmp_path, drain_timeout=0.2, a=old)

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            pid = house.pid("a")
            house.write(a=model.model_copy(update={"context": 512}))
            plan = await supervisor.reload(dry_run=False)

            assert set(plan.replace["a"]) == {"env", "context"}
            assert house.pid("a") != pid
            assert len(await ask(supervisor, "a")) == 100
            await read(ticket)
            assert ticket.outcome.name == "drained"

    async def test_replacing_a_model_refuses_nobody_who_has_found_it(
        self, tmp_path: Path, model: ModelSettings
    ):
        """A request whose prompt is still being tokenised gets its place in the old engine."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            old = house.pid("a")
            with supervisor.using("a") as served:
                house.write(a=model.model_copy(update={"context": 512}))
                await supervisor.reload(dry_run=False)
                assert house.pid("a") != old
                assert await served.tokenizer.encode("hi")
                async with served.gateway.admit(generation()) as ticket:
                    assert len(await read(ticket)) == 100
            await eventually(lambda: not is_running(old))

    async def test_one_who_never_leaves_holds_a_replaced_model_to_the_deadline(
        self, tmp_path: Path, model: ModelSettings
    ):
        """Then nothing more is admitted, and the old engine goes."""
        house = House(tmp_path, drain_timeout=0.05, a=model)

        async with running(house) as supervisor:
            old = house.pid("a")

            async def replace() -> None:
                house.write(a=model.model_copy(update={"context": 512}))
                await supervisor.reload(dry_run=False)
                await eventually(lambda: not is_running(old))

            # Draining until the host has seen its engine's end, which follows.
            with pytest.raises((ModelNotReady, Draining)):
                await late(supervisor, replace)

    async def test_engines_of_one_model_never_share_a_tmpdir(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """While one is replaced there are two; later the first folder is free again."""
        engines = tmp_path / "cache" / "engines" / "a"
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor:
            old = house.pid("a")
            async with streaming(supervisor, "a"):
                house.write(a=model)
                await supervisor.reload(dry_run=False)
                assert temporary_folder(old) == engines / "1"
                assert temporary_folder(house.pid("a")) == engines / "2"
            await eventually(lambda: not is_running(old))
            await eventually(lambda: is_unlocked(engines / "1"))
            house.write(a=model.model_copy(update={"context": 512}))
            await supervisor.reload(dry_run=False)
            assert temporary_folder(house.pid("a")) == engines / "1"

    async def test_second_signal_reaches_models_that_retire(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """An engine that only finishes its old requests ends with the others."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            old = house.pid("a")
            house.write(a=model)
            await supervisor.reload(dry_run=False)
            supervisor.terminate()

            with pytest.raises(EngineFailed):
                await read(ticket)
            await eventually(lambda: not is_running(old))

    async def test_model_that_cannot_be_built_undoes_the_whole_reload(
        self, tmp_path: Path, model: ModelSettings
    ):
        """One bad new model: no good one comes, no old one goes, and no series stays."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            pid = house.pid("a")
            house.write(good=model, bad=loading(model, "fail"))
            with pytest.raises(ConfigError) as caught:
                await supervisor.reload(dry_run=False)

            assert caught.value.problems == ["models.bad: there are no weights in it"]
            assert supervisor.model_ids() == ["a"]
            assert house.pid("a") == pid
            assert house.models_in_metrics() == {"a"}

    async def test_model_without_room_for_two_engines_drains_first(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """The plan says so; what runs finishes on the old engine, which is gone before the new
        one starts, and new requests get 503 meanwhile.
        """
        old = gated(model, gate)
        house = House(tmp_path, memory=WEIGHTS + 5000, a=old)

        async with running(house) as supervisor:
            async with streaming(supervisor, "a") as ticket:
                pid = house.pid("a")
                house.write(a=old.model_copy(update={"context": 512}))
                assert (await supervisor.reload(dry_run=True)).drain_first == ("a",)
                reload = asyncio.create_task(supervisor.reload(dry_run=False))
                await house.until("a", "draining")
                with pytest.raises(Draining):
                    found(supervisor, "a")
                gate.touch()
                await read(ticket)
                assert ticket.outcome.name == "length"
            assert (await reload).drain_first == ("a",)
            assert not is_running(pid)
            assert house.state("a") == "ready"
            assert len(await ask(supervisor, "a")) == 100

    async def test_model_that_went_first_comes_back_if_the_new_one_cannot_be_had(
        self, tmp_path: Path, model: ModelSettings
    ):
        """Nothing has changed but the process."""
        house = House(tmp_path, memory=WEIGHTS + 5000, a=model)

        async with running(house) as supervisor:
            before = supervisor.config()
            house.write(a=loading(model, "fail"))
            with pytest.raises(ConfigError) as caught:
                await supervisor.reload(dry_run=False)

            assert caught.value.problems == ["models.a: there are no weights in it"]
            assert supervisor.config() == before
            await house.until("a", "ready")
            assert len(await ask(supervisor, "a")) == 100

    async def test_reloads_queue(self, tmp_path: Path, model: ModelSettings, gate: Path):
        """Two at once happen one after the other; the last file wins."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            house.write(a=model, b=loading(model, str(gate)))
            first = asyncio.create_task(supervisor.reload(dry_run=False))
            await eventually(lambda: bool(supervisor.status().reloading))
            house.write(a=model, c=model)
            second = asyncio.create_task(supervisor.reload(dry_run=False))
            gate.touch()

            assert (await first).add == ("b",)
            assert ((await second).add, (await second).remove) == (("c",), ("b",))
            assert supervisor.model_ids() == ["a", "c"]

    async def test_reload_while_a_model_loads(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """A model that still loads is retuned like any other and comes up with the new terms."""
        slow = loading(model, str(gate))
        house = House(tmp_path, a=slow)
        house.supervisor.start()
        house.write(a=slow.model_copy(update={"batch": BatchSettings(width=8)}))

        await house.supervisor.reload(dry_run=False)
        gate.touch()
        await house.until("a", "ready")

        assert house.supervisor.status().models[0].width == 8
        assert len(await ask(house.supervisor, "a")) == 100
        await house.stop()

    async def test_replacing_a_drained_model_keeps_it_drained(
        self, tmp_path: Path, model: ModelSettings
    ):
        """A reload is no resume."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            await supervisor.drain("a", timeout=1, wait=True)
            house.write(a=model.model_copy(update={"context": 512}))
            await supervisor.reload(dry_run=False)

            assert house.state("a") == "draining"

    async def test_stop_ends_a_reload(self, tmp_path: Path, model: ModelSettings, gate: Path):
        """A reload that still builds is given up, and no engine outlives the daemon."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            house.write(a=model, b=loading(model, str(gate)))
            reload = asyncio.create_task(supervisor.reload(dry_run=False))
            await eventually(lambda: bool(supervisor.status().reloading))
            async with asyncio.timeout(3):
                await house.stop()

            with pytest.raises(Conflict):
                await reload
            with pytest.raises(Conflict):
                supervisor.resume(None)


class TestLiveChanges:
    async def test_change_is_in_force_and_told_apart_from_the_file(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Running requests go on; the engine stays; the etag moves."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            pid = house.pid("a")
            before = supervisor.config()
            after = await supervisor.patch("a", "batch", {"width": 8}, [before.etag])
            await supervisor.patch("a", "policy", {"seed": "serial"}, None)

            assert before.differs_from_file == []
            assert after.differs_from_file == ["models.a.batch.width"]
            assert after.etag != before.etag
            assert supervisor.status().models[0].width == 8
            assert house.pid("a") == pid
            gateway = found(supervisor, "a").gateway
            async with gateway.admit(generation(traits=("seed",))) as next_one:
                assert next_one.lane is Lane.SERIAL
            gate.touch()
            await read(ticket)
            assert ticket.outcome.name == "length"

    async def test_change_that_was_based_on_something_else_is_refused(
        self, tmp_path: Path, model: ModelSettings
    ):
        """Two operators do not undo each other unawares."""
        async with running(House(tmp_path, a=model)) as supervisor:
            etag = supervisor.config().etag
            await supervisor.patch("a", "batch", {"queue": 1}, [etag])

            with pytest.raises(PreconditionFailed):
                await supervisor.patch("a", "batch", {"queue": 2}, [etag])
            assert "models.a.batch.queue" in supervisor.config().differs_from_file

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"width": 0}, "models.a.batch.width"),
            ({"width": "8"}, "models.a.batch.width"),
            ({"widht": 8}, "models.a.batch.widht"),
            ({"kv_bits": 8}, "models.a.batch.kv_bits"),
        ],
    )
    async def test_change_that_cannot_be_names_its_key(
        self, tmp_path: Path, model: ModelSettings, changes: dict[str, object], expected: str
    ):
        """As in the file; nothing has changed."""
        async with running(House(tmp_path, a=model)) as supervisor:
            before = supervisor.config()
            with pytest.raises(ConfigError) as caught:
                await supervisor.patch("a", "batch", changes, None)

            assert [problem.partition(":")[0] for problem in caught.value.problems] == [expected]
            assert supervisor.config() == before

    async def test_reload_undoes_live_changes_and_lists_them(
        self, tmp_path: Path, model: ModelSettings
    ):
        """The file is what counts, also when it has not changed itself."""
        async with running(House(tmp_path, a=model)) as supervisor:
            before = supervisor.config()
            await supervisor.patch("a", "batch", {"width": 8}, None)

            plan = await supervisor.reload(dry_run=False)

            assert plan.undo == {"a": ("batch.width",)}
            assert supervisor.config() == before

    async def test_variables_of_engines_are_masked(self, tmp_path: Path, model: ModelSettings):
        """They may hold secrets."""
        secret = model.model_copy(update={"env": {"HF_TOKEN": "hf_secret"}})
        async with running(House(tmp_path, a=secret)) as supervisor:
            assert "hf_secret" not in str(supervisor.config())
            assert "HF_TOKEN" in str(supervisor.config())


class TestModels:
    async def test_unloaded_model_gives_its_engine_back_and_loads_again(
        self, tmp_path: Path, model: ModelSettings
    ):
        """Requests get 503 meanwhile; a reload of the same file does not load it."""
        house = House(tmp_path, a=model, b=model)

        async with running(house) as supervisor:
            pid = house.pid("a")
            assert (await supervisor.unload("a")).state == "stopped"
            assert not is_running(pid)
            with pytest.raises(ModelNotReady, match="stopped"):
                found(supervisor, "a")
            await supervisor.reload(dry_run=False)
            assert house.state("a") == "stopped"
            assert supervisor.ready()

            assert (await supervisor.load("a")).state == "ready"
            assert len(await ask(supervisor, "a")) == 100
            with pytest.raises(Conflict):
                await supervisor.load("a")

    async def test_unload_cuts_at_the_deadline(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """As a stop of the daemon does, for one model."""
        house = House(tmp_path, drain_timeout=0.05, a=gated(model, gate))

        async with running(house) as supervisor:
            async with streaming(supervisor, "a") as ticket:
                unloading = asyncio.create_task(supervisor.unload("a"))
                await read(ticket)
            assert ticket.outcome.name == "drained"
            assert (await unloading).state == "stopped"

    async def test_failed_model_can_be_loaded_again(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """What kept it from starting may be gone."""
        settings = model.model_copy(update={"source": str(tmp_path / "later")})
        house = House(tmp_path, a=settings)

        async with running(house) as supervisor:
            assert house.state("a") == "failed"
            model_folder(tmp_path, "later")

            assert (await supervisor.load("a")).state == "ready"

    async def test_restart_overlaps_and_drops_nothing(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """The new engine serves before the old one, which finishes what it has, is sent away."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor, streaming(supervisor, "a") as ticket:
            old = house.pid("a")
            assert (await supervisor.restart("a")).state == "ready"
            assert house.pid("a") != old
            assert is_running(old)
            gate.touch()
            await read(ticket)
            assert ticket.outcome.name == "length"

    async def test_drained_model_that_is_restarted_stays_drained(
        self, tmp_path: Path, model: ModelSettings
    ):
        """So it is after an unload and a load: only `resume` admits again."""
        house = House(tmp_path, a=model)

        async with running(house) as supervisor:
            await supervisor.drain("a", timeout=1, wait=True)
            await supervisor.restart("a")
            assert house.state("a") == "draining"
            await supervisor.unload("a")
            await supervisor.load("a")
            assert house.state("a") == "draining"
            supervisor.resume("a")
            assert len(await ask(supervisor, "a")) == 100

    async def test_requests_are_listed_and_ended_by_id(
        self, tmp_path: Path, model: ModelSettings, gate: Path
    ):
        """Who runs and who waits; one that an operator ends is told so."""
        house = House(tmp_path, a=gated(model, gate))

        async with running(house) as supervisor:
            gateway = found(supervisor, "a").gateway
            async with (
                streaming(supervisor, "a"),
                streaming(supervisor, "a") as second,
                gateway.admit(generation("waits")) as waiting,
            ):
                states = [(r.id, r.model, r.state) for r in supervisor.requests()]
                assert states == [("r", "a", "running")] * 2 + [("waits", "a", "waiting")]
                assert supervisor.cancel("waits") == 1
                with pytest.raises(Withdrawn):
                    await read(waiting)
                assert waiting.outcome.name == "cancelled"
                assert supervisor.cancel("r") == 2
                with pytest.raises(Withdrawn):
                    await read(second)
            with pytest.raises(NotFound):
                supervisor.cancel("r")
