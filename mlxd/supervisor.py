"""All models: who serves what, and how that changes without dropping a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Literal

import structlog

from mlxd import __version__
from mlxd.config import ServerSettings, Settings, etag
from mlxd.draining import finish, idle_within, stop_all
from mlxd.errors import ConfigError, Conflict, NotFound
from mlxd.host import Host
from mlxd.host.run import Means
from mlxd.lifecycle import State
from mlxd.operations import DaemonStatus, DrainReport
from mlxd.plan import Plan, diff
from mlxd.serving import Identity, Served

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The configuration in use and its models; replaced whole, by one assignment."""

    settings: Settings
    hosts: Mapping[str, Host]  # in the file's order

    def find(self, name: str) -> Host:
        """The model of this id or alias. Raises NotFound."""
        for model_id, settings in self.settings.models.items():
            if name == model_id or name in settings.aliases:
                return self.hosts[model_id]
        raise NotFound(
            f"the model {name[:80]!r} does not exist", param="model", code="model_not_found"
        )


class Supervisor:
    """Owns every host. Fulfils `serving.Directory` and `operations.Operations`."""

    def __init__(
        self,
        settings: Settings,
        means: Means,
        read: Callable[[], Settings],
        on_change: Callable[[Settings], None],
    ) -> None:
        """
        Args:
            read: reads the configuration again; raises ConfigError.
            on_change: told of the settings that a reload has put in force.
        """
        self._means = means
        self._read = read
        self._on_change = on_change
        hosts = {model_id: self._host(model_id, settings) for model_id in settings.models}
        self._now = Snapshot(settings, hosts)
        self._reloading = asyncio.Lock()
        self._building: Sequence[Host] = ()  # not serving yet
        self._retiring: dict[Host, asyncio.Task[None]] = {}  # serving no more
        self._draining = False
        self._stopping = False
        means.metrics.configured()

    # --- serving.Directory

    def model_ids(self) -> Sequence[str]:
        """Ids in the file's order."""
        return list(self._now.hosts)

    def identify(self, name: str) -> Identity:
        """The model of this id or alias, whatever its state. Raises NotFound."""
        host = self._now.find(name)
        return Identity(host.id, host.created)

    def using(self, name: str) -> AbstractContextManager[Served]:
        """The model of this id or alias, kept for as long as the context lasts.

        Raises:
            NotFound: no such model.
            ModelNotReady, Draining: on entering; it cannot serve now.
        """
        return self._now.find(name).using()

    def ready(self, name: str | None = None) -> bool:
        """Whether the daemon, or one model, should be sent traffic. Raises NotFound."""
        if name is not None:
            return self._now.find(name).state is State.READY and not self._stopping
        return self._state() == "ready"

    # --- start and stop

    def start(self) -> None:
        """Begin to load every model; none holds another back, and a failure is the model's own."""
        for host in self._now.hosts.values():
            host.start()

    async def stop(self, delivered: Callable[[], Awaitable[None]]) -> None:
        """Admit nothing, finish what was accepted up to `drain_timeout`, cut the rest, and end
        every engine.

        Args:
            delivered: waits until every answer has been sent to its end.
        """
        self._stopping = True
        hosts = [*self._now.hosts.values()]
        for host in hosts:
            host.drain()
        # Nobody waits for models that have not served yet.
        await stop_all([*self._building, *(host for host in hosts if not host.was_ready)])
        await finish(hosts, self._now.settings.server.drain_timeout, delivered)
        await stop_all(hosts)
        await asyncio.gather(*self._retiring.values())

    def terminate(self) -> None:
        """Send every engine away without waiting for anything."""
        for host in (*self._now.hosts.values(), *self._building, *self._retiring):
            host.terminate()

    # --- operations.Operations

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        return self._now.settings

    @property
    def server(self) -> ServerSettings:
        """Its server settings."""
        return self._now.settings.server

    def status(self) -> DaemonStatus:
        """One consistent snapshot: nothing else runs while it is taken."""
        return DaemonStatus(
            state=self._state(),
            version=__version__,
            config_etag=etag(self._now.settings),
            reloading=self._reloading.locked(),
            models=[host.status() for host in self._now.hosts.values()],
        )

    async def drain(self, model: str | None, *, timeout: float | None, wait: bool) -> DrainReport:
        """Stop admitting and let what was accepted finish; nothing is ever cut.

        Raises:
            NotFound: no such model.
            Conflict: it was resumed before it had drained.
        """
        hosts = self._select(model)
        self._draining = self._draining or model is None
        for host in hosts:
            host.drain()
        seconds = self.server.drain_timeout if timeout is None else timeout
        done = await idle_within(hosts, seconds if wait else 0.0)
        if not all(host.draining for host in hosts):
            raise Conflict("resumed before everything had drained")
        return DrainReport(
            "drained" if done else "draining", {host.id: host.live() for host in hosts}
        )

    def resume(self, model: str | None) -> DaemonStatus:
        """Admit again. Raises NotFound, or Conflict when the daemon is stopping."""
        self._refuse_while_stopping()
        for host in self._select(model):
            host.resume()
        self._draining = False
        return self.status()

    async def reload(self, *, dry_run: bool) -> Plan:
        """Read the configuration again and, unless `dry_run`, apply the plan.

        One at a time; others wait for their turn.

        Raises:
            ConfigError: with every problem; nothing has changed.
            Conflict: the daemon is stopping.
        """
        async with self._reloading:
            self._refuse_while_stopping()
            if dry_run:
                return diff(self._now.settings, self._read())
            try:
                settings = self._read()
                plan = diff(self._now.settings, settings)
                await self._apply(plan, settings)
            except ConfigError as error:
                self._means.metrics.reloaded(success=False)
                # Told without a traceback: the mistake is in a file.
                log.error(  # noqa: TRY400
                    "reload failed; nothing has changed", problems=error.problems
                )
                raise
            self._means.metrics.reloaded(success=True)
            log.info("reloaded", plan=asdict(plan), etag=etag(settings))
            return plan

    # --- inside

    async def _apply(self, plan: Plan, settings: Settings) -> None:
        """Build everything new, swap once, then drain what is old."""
        old = self._now.hosts
        built = await self._build([*plan.add, *plan.replace], settings)

        # From here on nothing waits and nothing fails.
        self._now = Snapshot(
            settings,
            {model_id: built.get(model_id) or old[model_id] for model_id in settings.models},
        )
        for model_id, host in self._now.hosts.items():
            if model_id in built:
                host.enter(draining=self._draining or (model_id in old and old[model_id].draining))
            else:
                host.retune(settings.models[model_id], settings.server.request_timeout)
        self._on_change(settings)
        for model_id in (*plan.replace, *plan.remove):
            self._retire(old[model_id], settings.server.drain_timeout)

    async def _build(self, model_ids: Iterable[str], settings: Settings) -> dict[str, Host]:
        built = {model_id: self._host(model_id, settings) for model_id in model_ids}
        self._building = tuple(built.values())
        try:
            for host in self._building:
                host.start(patient=False)
            await asyncio.gather(*(host.started() for host in self._building))
            self._refuse_while_stopping()
            _refuse_failures(self._building)
        except BaseException:
            await stop_all(self._building)
            for host in self._building:
                host.forget()
            raise
        finally:
            self._building = ()
        return built

    def _host(self, model_id: str, settings: Settings) -> Host:
        return Host(
            model_id, settings.models[model_id], settings.server.request_timeout, self._means
        )

    def _retire(self, host: Host, drain_timeout: float) -> None:
        async def retire() -> None:
            await finish([host], drain_timeout, host.delivered)
            await host.stop()
            host.forget()
            log.info("model retired", model=host.id)

        host.retire()
        task = asyncio.create_task(retire(), name=f"retire {host.id}")
        self._retiring[host] = task
        task.add_done_callback(lambda _: self._retiring.pop(host))

    def _select(self, model: str | None) -> list[Host]:
        return [*self._now.hosts.values()] if model is None else [self._now.find(model)]

    def _state(self) -> Literal["starting", "ready", "draining", "stopping", "unavailable"]:
        hosts = self._now.hosts.values()
        if self._stopping:
            return "stopping"
        if self._draining:
            return "draining"
        if any(host.state is State.READY for host in hosts):
            return "ready" if all(host.was_ready for host in hosts) else "starting"
        return "starting" if any(host.state is State.STARTING for host in hosts) else "unavailable"

    def _refuse_while_stopping(self) -> None:
        if self._stopping:
            raise Conflict("the daemon is stopping")


def _refuse_failures(hosts: Iterable[Host]) -> None:
    failed = [host for host in hosts if host.state is State.FAILED]
    if failed:
        raise ConfigError([f"models.{host.id}: {host.reason}" for host in failed])
