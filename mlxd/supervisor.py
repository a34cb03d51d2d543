"""All models: who serves what, and how that changes without dropping a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Literal, TypeVar

import structlog

from mlxd import __version__
from mlxd.changes import Changes
from mlxd.config import LiveTable, ServerSettings, Settings, etag, patched, shown
from mlxd.draining import finish, idle_within, stop_all
from mlxd.errors import ConfigError, Conflict, NotFound, PreconditionFailed
from mlxd.fleet import Fleet, refuse_failures
from mlxd.host import Host
from mlxd.host.run import Means
from mlxd.lifecycle import State
from mlxd.operations import (
    Configuration,
    DaemonStatus,
    DrainReport,
    ModelStatus,
    RequestStatus,
)
from mlxd.plan import Plan, diff, live_changes
from mlxd.serving import Identity, Served

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


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
        self._metrics = means.metrics
        self._read = read
        self._on_change = on_change
        self._fleet = Fleet(settings, means)
        self._changes = Changes()
        self._served = False  # every model was ready once
        self._draining = False
        means.metrics.configured()

    # --- serving.Directory

    def model_ids(self) -> Sequence[str]:
        """Ids in the file's order."""
        return list(self._fleet.now.hosts)

    def identify(self, name: str) -> Identity:
        """The model of this id or alias, whatever its state. Raises NotFound."""
        host = self._fleet.now.find(name)
        return Identity(host.id, host.created)

    def using(self, name: str) -> AbstractContextManager[Served]:
        """The model of this id or alias, kept for as long as the context lasts.

        Raises:
            NotFound: no such model.
            ModelNotReady, Draining: on entering; it cannot serve now.
        """
        return self._fleet.now.find(name).using()

    def ready(self, name: str | None = None) -> bool:
        """Whether the daemon, or one model, should be sent traffic. Raises NotFound."""
        if name is not None:
            return self._fleet.now.find(name).state is State.READY and not self._fleet.stopping
        return self._state() == "ready"

    # --- start and stop

    def start(self) -> None:
        """Begin to load every model; none holds another back, and a failure is the model's own."""
        for host in self._fleet.now.hosts.values():
            host.start()

    async def stop(self, delivered: Callable[[], Awaitable[None]]) -> None:
        """Admit nothing, finish what was accepted up to `drain_timeout`, cut the rest, and end
        every engine.

        Args:
            delivered: waits until every answer has been sent to its end.
        """
        self._fleet.stopping = True
        hosts = [*self._fleet.now.hosts.values()]
        for host in hosts:
            host.drain()
        # Nobody waits for models that have not served yet.
        await self._fleet.stop_building()
        await stop_all(host for host in hosts if not host.was_ready)
        await finish(hosts, self._fleet.now.settings.server.drain_timeout, delivered)
        await stop_all(hosts)
        await self._fleet.retired()
        await self._changes.ended()

    def terminate(self) -> None:
        """Send every engine away without waiting for anything."""
        for host in self._fleet:
            host.terminate()

    # --- operations.Operations

    @property
    def settings(self) -> Settings:
        """The configuration in force."""
        return self._fleet.now.settings

    @property
    def server(self) -> ServerSettings:
        """Its server settings."""
        return self._fleet.now.settings.server

    def status(self) -> DaemonStatus:
        """One consistent snapshot: nothing else runs while it is taken."""
        return DaemonStatus(
            state=self._state(),
            version=__version__,
            config_etag=etag(self._fleet.now.settings),
            reloading=self._changes.busy,
            models=[host.status() for host in self._fleet.now.hosts.values()],
        )

    async def drain(self, model: str | None, *, timeout: float | None, wait: bool) -> DrainReport:
        """Stop admitting and let what was accepted finish; nothing is ever cut."""
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
        self._fleet.refuse_while_stopping()
        for host in self._select(model):
            host.resume()
        self._draining = False
        return self.status()

    def config(self) -> Configuration:
        """What is in force, and where it differs from the file."""
        now = self._fleet.now
        return Configuration(
            etag(now.settings), shown(now.settings), live_changes(now.file, now.settings)
        )

    async def reload(self, *, dry_run: bool) -> Plan:
        """Read the configuration again and, unless `dry_run`, apply the plan."""

        async def change() -> Plan:
            if dry_run:
                return self._fleet.planned(self._read())
            try:
                settings = self._read()
                plan = self._fleet.planned(settings)
                await self._apply(plan, settings, settings)
            except ConfigError as error:
                self._metrics.reloaded(success=False)
                # Told without a traceback: the mistake is in a file.
                log.error(  # noqa: TRY400
                    "reload failed; nothing has changed", problems=error.problems
                )
                raise
            self._metrics.reloaded(success=True)
            log.info("reloaded", plan=asdict(plan), etag=etag(settings))
            return plan

        return await self._change("reload", change)

    async def patch(
        self,
        model: str,
        table: LiveTable,
        changes: Mapping[str, object],
        match: Sequence[str] | None,
    ) -> Configuration:
        """Change a model's settings live; the file is not written."""

        async def change() -> Configuration:
            now = self._fleet.now
            host = now.find(model)
            if match is not None and etag(now.settings) not in match:
                raise PreconditionFailed("the configuration has changed since it was read")
            settings = patched(now.settings, host.id, table, changes)
            if replaced := diff(now.settings, settings, now.file).replace.get(host.id):
                raise ConfigError(
                    [
                        f"models.{host.id}.{key}: only a reload of the file can change it"
                        for key in replaced
                    ]
                )
            self._fleet.swap(settings, {})
            log.info("changed live", model=host.id, table=table, changes=dict(changes))
            return self.config()

        return await self._change("patch", change)

    async def load(self, model: str) -> ModelStatus:
        """Start a model that is stopped or has failed; returns when it serves."""

        async def change() -> Host:
            host = self._fleet.now.find(model)
            if host.state not in {State.STOPPED, State.FAILED}:
                raise Conflict(f"the model {host.id} is {host.state}")
            return self._fleet.renew(host.id, draining=self._draining)

        # Out of turn from here on: an unload must not wait for what it is to end.
        new = await self._change("load", change)
        await new.started()
        refuse_failures([new])
        if new.state is State.STOPPED:
            raise Conflict(f"the model {new.id} was stopped while it loaded")
        return new.status()

    async def unload(self, model: str) -> ModelStatus:
        """Drain a model up to `drain_timeout`, cut what is left, and end its engine."""

        async def change() -> ModelStatus:
            host = self._fleet.now.find(model)
            await self._fleet.unload(host)
            return host.status()

        return await self._change("unload", change)

    async def restart(self, model: str) -> ModelStatus:
        """Give a model a new engine, and let the old one finish what it has."""

        async def change() -> ModelStatus:
            host = self._fleet.now.find(model)
            plan = self._fleet.fitted(Plan(replace={host.id: ()}))
            await self._apply(plan, self._fleet.now.settings, self._fleet.now.file)
            return self._fleet.now.hosts[host.id].status()

        return await self._change("restart", change)

    def clear_cache(self, model: str) -> None:
        """Forget the prompts that a model's engine keeps. Raises NotFound."""
        self._fleet.now.find(model).clear_cache()

    def requests(self) -> list[RequestStatus]:
        """Who runs and who waits, also in models that retire."""
        return [request for host in self._fleet for request in host.requests()]

    def cancel(self, request_id: str) -> int:
        """End the requests of this id; returns how many. Raises NotFound for none."""
        count = sum(host.cancel(request_id) for host in self._fleet)
        if not count:
            raise NotFound(f"no request {request_id[:80]!r} runs or waits")
        return count

    # --- inside

    async def _change(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change in its turn. Raises Conflict when the daemon is stopping."""

        async def unless_stopping() -> T:
            self._fleet.refuse_while_stopping()
            self._was_ready()  # before a model is loaded anew
            return await change()

        return await self._changes.make(name, unless_stopping)

    async def _apply(self, plan: Plan, settings: Settings, file: Settings) -> None:
        """Build everything new, swap once, then drain what is old."""
        built = await self._fleet.build_all(plan, settings)

        # From here on nothing waits and nothing fails.
        old = self._fleet.swap(settings, built, draining=self._draining, file=file)
        self._on_change(settings)
        for host in old:
            self._fleet.retire(host)

    def _select(self, model: str | None) -> list[Host]:
        now = self._fleet.now
        return [*now.hosts.values()] if model is None else [now.find(model)]

    def _state(self) -> Literal["starting", "ready", "draining", "stopping", "unavailable"]:
        hosts = self._fleet.now.hosts.values()
        if self._fleet.stopping:
            return "stopping"
        if self._draining:
            return "draining"
        if any(host.state is State.READY for host in hosts):
            return "ready" if self._was_ready() else "starting"
        return "starting" if any(host.state is State.STARTING for host in hosts) else "unavailable"

    def _was_ready(self) -> bool:
        """Whether every model was ready once. No later start of one makes that untrue."""
        hosts = self._fleet.now.hosts.values()
        self._served = self._served or all(host.was_ready for host in hosts)
        return self._served
