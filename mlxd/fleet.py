"""The hosts of all models: those that serve, those that are built, those that retire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import structlog

from mlxd.config import Settings
from mlxd.draining import finish, stop_all
from mlxd.errors import ConfigError, Conflict, NotFound
from mlxd.host import Host
from mlxd.host.run import Means
from mlxd.lifecycle import State
from mlxd.plan import Plan, diff, with_room

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The configuration in use and its models; replaced whole, by one assignment."""

    settings: Settings
    file: Settings  # as it was read; `settings` may have been changed live since
    hosts: Mapping[str, Host]  # in the file's order

    def find(self, name: str) -> Host:
        """The model of this id or alias. Raises NotFound."""
        for model_id, settings in self.settings.models.items():
            if name == model_id or name in settings.aliases:
                return self.hosts[model_id]
        raise NotFound(
            f"the model {name[:80]!r} does not exist", param="model", code="model_not_found"
        )


class Fleet:
    """Owns every host. What is new is built beside what serves, and put in its place at once."""

    def __init__(self, settings: Settings, means: Means) -> None:
        self._means = means
        hosts = {model_id: self._host(model_id, settings) for model_id in settings.models}
        self.now = Snapshot(settings, settings, hosts)
        self.stopping = False
        self._building: set[Host] = set()  # not serving yet
        self._retiring: dict[Host, asyncio.Task[None]] = {}  # serving no more

    def __iter__(self) -> Iterator[Host]:
        """All of them, whatever they do."""
        return iter((*self.now.hosts.values(), *self._building, *self._retiring))

    def planned(self, settings: Settings) -> Plan:
        """What a change to these settings would do. Raises ConfigError where it cannot be."""
        return self.fitted(diff(self.now.settings, settings, self.now.file))

    def fitted(self, plan: Plan) -> Plan:
        """The plan, with those told that have no room beside what they replace."""
        needs = {model_id: self.now.hosts[model_id].engine_bytes for model_id in plan.replace}
        return with_room(plan, needs, self._room())

    async def build_all(self, plan: Plan, settings: Settings) -> dict[str, Host]:
        """Everything new of a plan, ready to serve, beside what serves.

        Where memory has no room for both, the old one goes first, and comes back if what was
        to follow it cannot be had.

        Raises:
            ConfigError: naming each that cannot be had; nothing has changed.
            Conflict: the daemon is stopping.
        """
        beside = [*plan.add, *(m for m in plan.replace if m not in plan.drain_first)]
        built = await self.build(beside, settings)
        gone: list[Host] = []
        try:
            self.refuse_while_stopping()
            for model_id in plan.drain_first:
                gone.append(self.now.hosts[model_id])
                await self.unload(gone[-1])
                self.refuse_while_stopping()
                built |= await self.build([model_id], settings)
                self.refuse_while_stopping()
        except BaseException:
            await self.discard(built.values())
            for host in gone if not self.stopping else ():
                self.renew(host.id, draining=host.draining)
            raise
        return built

    def refuse_while_stopping(self) -> None:
        """Raises Conflict when the daemon is stopping."""
        if self.stopping:
            raise Conflict("the daemon is stopping")

    async def build(self, model_ids: Iterable[str], settings: Settings) -> dict[str, Host]:
        """New hosts of these models, ready to serve; cancelled or failed, none of them stays.

        Raises:
            ConfigError: naming each that cannot be had.
        """
        built = {model_id: self._host(model_id, settings) for model_id in model_ids}
        self._building |= set(built.values())
        try:
            for host in built.values():
                host.start(patient=False)
            await asyncio.gather(*(host.started() for host in built.values()))
            refuse_failures(built.values())
        except BaseException:
            await self.discard(built.values())
            raise
        finally:
            self._building -= set(built.values())
        return built

    async def unload(self, host: Host) -> None:
        """Let a model finish what it has, up to `drain_timeout`, cut the rest, end its engine."""
        drained = host.draining
        host.drain()
        await finish([host], self.now.settings.server.drain_timeout, host.delivered)
        await host.stop()
        if not drained:
            host.resume()  # a drain of its own would outlive the next load
        log.info("model unloaded", model=host.id)

    async def discard(self, hosts: Iterable[Host]) -> None:
        """End hosts that were built and are not wanted after all."""
        hosts = list(hosts)
        await stop_all(hosts)
        for host in hosts:
            host.forget()

    def renew(self, model_id: str, *, draining: bool) -> Host:
        """Put a new host, which starts only now, in the place of one that has ended."""
        old = self.now.hosts[model_id]
        new = self._host(model_id, self.now.settings)
        self.swap(self.now.settings, {model_id: new}, draining=draining)
        old.forget()
        new.start(patient=False)
        return new

    def swap(
        self,
        settings: Settings,
        built: Mapping[str, Host],
        *,
        draining: bool = False,
        file: Settings | None = None,
    ) -> list[Host]:
        """Serve with these settings and hosts from now on; nothing waits and nothing fails.

        Args:
            draining: whether new models admit nothing, as those before them that drain.
            file: the settings as they were read, where that is new.

        Returns:
            The hosts that serve no more.
        """
        old = self.now.hosts
        hosts = {model_id: built.get(model_id) or old[model_id] for model_id in settings.models}
        self.now = Snapshot(settings, file or self.now.file, hosts)
        for model_id, host in hosts.items():
            if model_id in built:
                host.enter(draining=draining or (model_id in old and old[model_id].draining))
            else:
                host.retune(settings.models[model_id], settings.server.request_timeout)
        return [host for host in old.values() if host not in hosts.values()]

    def retire(self, host: Host) -> None:
        """Let one that serves no more finish what it has, up to `drain_timeout`, and end it."""

        async def retire() -> None:
            await finish([host], self.now.settings.server.drain_timeout, host.delivered)
            await host.stop()
            host.forget()
            log.info("model retired", model=host.id)

        host.retire()
        task = asyncio.create_task(retire(), name=f"retire {host.id}")
        self._retiring[host] = task
        task.add_done_callback(lambda _: self._retiring.pop(host))

    async def stop_building(self) -> None:
        """Give up whatever is built."""
        await stop_all([*self._building])

    async def retired(self) -> None:
        """Wait until all that retire have ended."""
        await asyncio.gather(*self._retiring.values())

    def _room(self) -> int | None:
        """Bytes for another engine beside all that are loaded and what their rows hold now."""
        free = self._means.memory.free
        return None if free is None else free - sum(h.kv_bytes + h.prefix_cache_bytes for h in self)

    def _host(self, model_id: str, settings: Settings) -> Host:
        return Host(
            model_id, settings.models[model_id], settings.server.request_timeout, self._means
        )


def refuse_failures(hosts: Iterable[Host]) -> None:
    """Raises ConfigError with the reason of each that has failed."""
    failed = [host for host in hosts if host.state is State.FAILED]
    if failed:
        raise ConfigError([f"models.{host.id}: {host.reason}" for host in failed])
