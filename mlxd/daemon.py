"""The composition root: what is built, in which order, and how it all ends.

The order at start: configuration, listener, HTTP, engines. A taken port ends
the process before anything costs time, and `/livez` and `/readyz` answer while
models load. What was entered in order is left in reverse.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from mlxd import __version__, logs
from mlxd.config import Settings, cache_dir, load, open_to_all, parse_listen
from mlxd.errors import ConfigError, Conflict
from mlxd.host.fetcher import Fetcher
from mlxd.host.link import ENGINE_COMMAND
from mlxd.host.restarts import RestartPolicy
from mlxd.host.run import Means, TokenizerLoader
from mlxd.host.watchdog import WatchPolicy
from mlxd.http.admin import admin_routes
from mlxd.http.app import make_admin_app, make_app, make_runner
from mlxd.http.auth import Access
from mlxd.http.inflight import InFlight
from mlxd.listener import bound, describe
from mlxd.memory import MemoryBudget
from mlxd.metrics import Metrics
from mlxd.metrics.vllm import VllmNames
from mlxd.notify import Manager, Notifier
from mlxd.supervisor import Supervisor
from mlxd.text.tokenizer import Tokenizer
from mlxd.traces import Tell, traced

#: Seconds that handlers get after the drain, which has waited for them already.
GOODBYE = 1.0
#: Seconds beyond `drain_timeout` in which everything has certainly ended.
END = 15.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


async def load_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a model's folder. Raises TokenizerError."""
    return await Tokenizer.load(folder, trust_remote_code=trust_remote_code)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon is composed with; tests put lighter ones in."""

    engine_command: Sequence[str] = ENGINE_COMMAND  # `--fd N` is added
    load_tokenizer: TokenizerLoader = load_tokenizer
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    watch: WatchPolicy = field(default_factory=WatchPolicy)


def run(config_path: Path, parts: Parts | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a drain, 1 when the address cannot be had.

    Raises:
        ConfigError: with every problem of the configuration.
    """
    path = config_path.absolute()
    settings = load(path, os.environ)
    try:
        logs.configure(settings.log, sys.stderr)
    except OSError as error:
        raise ConfigError([f"log.file: {settings.log.file}: {error.strerror}"]) from error
    _warn_of_open_files(settings)
    with ExitStack() as stack:
        try:
            listeners = _bind(settings, stack)
        except OSError as error:
            reason = error.strerror or str(error)
            log.error("cannot listen", listen=error.filename, reason=reason)  # noqa: TRY400
            return 1
        tell = stack.enter_context(traced(settings.traces))
        asyncio.run(Daemon(path, settings, parts or Parts(), tell).serve(listeners))
    return 0


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets."""

    public: socket.socket
    admin: socket.socket | None  # None = /admin is on the public one


def _bind(settings: Settings, stack: ExitStack) -> Listeners:
    """Raises OSError, whose `filename` is the address that cannot be had."""

    def bind(listen: str) -> socket.socket:
        try:
            return stack.enter_context(bound(parse_listen(listen)))
        except OSError as error:
            error.filename = listen
            raise

    own = settings.admin.listen
    return Listeners(bind(settings.server.listen), None if own is None else bind(own))


class Daemon:
    """One run of the daemon, from its bound listener to its end."""

    def __init__(self, path: Path, settings: Settings, parts: Parts, tell: Tell | None) -> None:
        registry = CollectorRegistry()
        cache = cache_dir(settings.server, os.environ)
        means = Means(
            engine_command=parts.engine_command,
            environment=os.environ,
            cache=cache,
            locate=Fetcher(cache).locate,
            load_tokenizer=parts.load_tokenizer,
            metrics=Metrics(registry),
            restarts=parts.restarts,
            watch=parts.watch,
            memory=MemoryBudget(settings.memory.budget),
        )

        def in_force(changed: Settings) -> None:
            _changed(changed)
            means.memory.resize(changed.memory.budget)

        self._supervisor = Supervisor(
            settings, means, read=partial(load, path, os.environ), on_change=in_force
        )
        self._registry = registry
        self._tell = tell
        registry.register(
            VllmNames(means.metrics, lambda: self._supervisor.settings.metrics.vllm_names)
        )
        self._notifier = Notifier(Manager.of(os.environ))
        self._receive_timeout = settings.server.receive_timeout
        self._in_flight = InFlight()
        self._asked_to_end = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    async def serve(self, listeners: Listeners) -> None:
        """Serve until a signal, then drain."""
        # Signals first: one that comes during the start must drain, too.
        with self._signals():
            # HTTP before engines: probes are answered while models load. At the
            # end it is the last to go, so that answers that are ready go out.
            async with self._http(listeners), self._beats(), self._engines():
                log.info(
                    "listening",
                    address=describe(listeners.public),
                    admin=None if listeners.admin is None else describe(listeners.admin),
                    version=__version__,
                )
                await self._asked_to_end.wait()
                # Leaving the engines' context drains: nothing new is admitted and
                # probes say so, what was accepted is finished and read by its
                # client, or cut at the deadline, and then every engine ends. The
                # listener stays open all the time.
                timeout = self._supervisor.server.drain_timeout
                self._notifier.stopping(timeout + END)
                log.info("draining", timeout=timeout)
        log.info("stopped")

    @asynccontextmanager
    async def _http(self, listeners: Listeners) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                self._site(self._public_app(listeners), listeners.public)
            )
            if listeners.admin is not None:
                await stack.enter_async_context(self._site(self._admin_app(), listeners.admin))
            yield

    def _public_app(self, listeners: Listeners) -> web.Application:
        return make_app(
            self._supervisor,
            server=lambda: self._supervisor.server,
            access=lambda: Access.public(self._supervisor.settings),
            tell=self._tell,
            registry=self._registry,
            extra_routes=admin_routes(self._supervisor) if listeners.admin is None else (),
        )

    def _admin_app(self) -> web.Application:
        return make_admin_app(
            self._supervisor,
            server=lambda: self._supervisor.server,
            access=lambda: Access.admin(self._supervisor.settings),
            registry=self._registry,
            routes=admin_routes(self._supervisor),
        )

    @asynccontextmanager
    async def _site(self, app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
        app.middlewares.insert(0, self._in_flight.middleware)
        # After a drain only readers that never read are left; they get no more
        # than a moment.
        runner = make_runner(app, shutdown_timeout=GOODBYE, receive_timeout=self._receive_timeout)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def _beats(self) -> AsyncIterator[None]:
        """Tell the service manager that this loop turns, also during the drain."""

        async def beat(interval: float) -> None:
            while True:
                self._notifier.beat(self._supervisor.status())
                await asyncio.sleep(interval)

        if (interval := self._notifier.interval) is None:
            yield
            return
        task = asyncio.create_task(beat(interval), name="beats")
        try:
            yield
        finally:
            task.cancel()

    @asynccontextmanager
    async def _engines(self) -> AsyncIterator[None]:
        self._supervisor.start()
        try:
            yield
        finally:
            await self._supervisor.stop(self._in_flight.none)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _end(self, number: signal.Signals) -> None:
        if self._asked_to_end.is_set():
            self._end_at_once(number)
        self._asked_to_end.set()

    def _end_at_once(self, number: signal.Signals) -> NoReturn:
        # Without leaving any context: whatever holds the drain could hold them.
        log.warning("second signal: ending at once", signal=number.name)
        self._supervisor.terminate()
        sys.stderr.flush()
        os._exit(128 + number)

    def _reload(self) -> None:
        task = asyncio.create_task(self._reload_and_log(), name="reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_and_log(self) -> None:
        self._notifier.reloading()
        try:
            await self._supervisor.reload(dry_run=False)
        except ConfigError:
            pass  # told by the supervisor, as for a reload that came over HTTP
        except Conflict as error:
            log.warning("no reload", reason=error.message)
        finally:
            self._notifier.reloaded()


def _warn_of_open_files(settings: Settings) -> None:
    files = open_to_all(settings.server.api_keys_file, settings.admin.token_file)
    if files:
        log.warning("every user of this machine can read these secrets", files=files)


def _changed(settings: Settings) -> None:
    """A reload has put these in force."""
    try:
        logs.configure(settings.log, sys.stderr)
    except OSError as error:
        reason = f"{settings.log.file}: {error.strerror}"
        log.error("the log goes on where it went", reason=reason)  # noqa: TRY400
    _warn_of_open_files(settings)
