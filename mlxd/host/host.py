"""One model's life: starting, ready, draining, stopped or failed. Owns process and gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from mlxd.config import ModelSettings, SamplingSettings
from mlxd.errors import Draining, MlxdError, ModelNotReady
from mlxd.gateway import DRAIN_RETRY, Gateway, ProtocolError
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms, tell_unbatchable
from mlxd.holds import Holds
from mlxd.host import defaults
from mlxd.host.fetcher import FetchFailed
from mlxd.host.link import BrokenFrame
from mlxd.host.run import EngineEnded, EngineRun, Means, load
from mlxd.lifecycle import State
from mlxd.metrics.model import ModelMetrics
from mlxd.operations import LaneCounts, LiveRequests, ModelStatus
from mlxd.serving import Served
from mlxd.text.tokenizer import Tokenizer, TokenizerError
from mlxd.wire import Capabilities, Lane, Ready

#: Seconds after which a client that met a model in its start may ask again.
START_RETRY = 5

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

#: What can keep a model from starting or end it: told as its reason.
_FAILURES = (FetchFailed, TokenizerError, EngineEnded, BrokenFrame, ProtocolError, OSError)


class Host:
    """One model, from its start to its end; a model that changes gets a new host.

    `state` is written by the one task that `start` makes, and by `stop`.
    """

    def __init__(
        self, model_id: str, settings: ModelSettings, request_timeout: float, means: Means
    ) -> None:
        self.id = model_id
        self.created = int(time.time())
        self.draining = False
        self.was_ready = False
        self.reason: str | None = None
        self._settings = settings
        self._terms = Terms(settings.batch, settings.policy, request_timeout)
        self._means = means
        self._stage = State.STARTING
        self._started = asyncio.Event()
        self._run: EngineRun | None = None
        self._gateway: Gateway | None = None
        self._served: Served | None = None
        self._uses = Holds()  # by those who have found the model and are not admitted yet
        self._own_sampling = SamplingSettings()
        self._life: asyncio.Task[None] | None = None
        self._log = log.bind(model=model_id)
        means.metrics.add(model_id, self)
        self._ledger = Ledger(ModelMetrics(means.metrics, model_id))

    # --- its life

    def start(self) -> None:
        """Begin to fetch and load; `started` tells when that is over."""
        self._life = asyncio.create_task(self._live(), name=f"host {self.id}")

    async def started(self) -> bool:
        """Wait until the model is ready, or cannot be. Returns whether it is ready."""
        await self._started.wait()
        return self._stage is State.READY

    async def stop(self) -> None:
        """End the engine, whatever it does, and release everything."""
        if self._life is None:
            return
        serves = self._stage is State.READY
        if self._stage is not State.FAILED:
            self._stage = State.STOPPED
        if serves and self._run is not None:
            await self._run.link.stop()
        else:
            self.terminate()
            self._life.cancel()
        await asyncio.wait([self._life])

    def terminate(self) -> None:
        """Send the engine away without asking it and without waiting."""
        if self._run is not None:
            self._run.link.terminate()

    def enter(self, *, draining: bool) -> None:
        """Take the place of whoever served under this id before."""
        self._means.metrics.show(self.id, self)
        if draining:
            self.drain()

    def forget(self) -> None:
        """Take the model's series away, unless a newer host has the same."""
        self._means.metrics.remove(self.id, self)

    # --- what it is

    @property
    def state(self) -> State:
        """Where the model is in its life."""
        if self.draining and self._stage is State.READY:
            return State.DRAINING
        return self._stage

    @property
    def width(self) -> int:
        """Rows that may decode together."""
        return self._terms.batch.width

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the engine holds."""
        return 0 if self._gateway is None else self._gateway.kv_bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the engine's prefix cache."""
        return 0 if self._gateway is None else self._gateway.prefix_cache_bytes

    def running(self, lane: Lane) -> int:
        """Requests that hold a row."""
        return 0 if self._gateway is None else self._gateway.running(lane)

    def waiting(self, lane: Lane) -> int:
        """Accepted requests that hold no row yet."""
        return 0 if self._gateway is None else self._gateway.waiting(lane)

    def live(self) -> LiveRequests:
        """What it still has to finish."""
        return LiveRequests(0, 0) if self._gateway is None else self._gateway.live()

    @contextmanager
    def using(self) -> Iterator[Served]:
        """The model as requests need it, which goes on serving until the context exits.

        A domain error that leaves the context is a request refused, and counted as one.

        Raises:
            ModelNotReady, Draining: it cannot serve now.
        """
        self._uses.take()
        try:
            yield self._serving()
        except MlxdError:
            self._ledger.rejected()
            raise
        finally:
            self._uses.release()

    def status(self) -> ModelStatus:
        """Everything about it at this moment."""
        run = self._run
        ready = None if run is None else run.loaded
        return ModelStatus(
            id=self.id,
            aliases=self._settings.aliases,
            source=self._settings.source,
            state=self.state,
            reason=self.reason,
            width=self.width,
            running=LaneCounts(self.running(Lane.BATCH), self.running(Lane.SERIAL)),
            waiting=LaneCounts(self.waiting(Lane.BATCH), self.waiting(Lane.SERIAL)),
            phase=None if run is None else run.phase(),
            engine=None if run is None else run.engine(),
            capabilities=None if ready is None else ready.capabilities,
            kv_bytes=self.kv_bytes,
            prefix_cache_bytes=self.prefix_cache_bytes,
            weight_bytes=0 if ready is None else ready.weight_bytes,
            restarts=0,
        )

    # --- what an operator wants of it

    def retire(self) -> None:
        """Nobody finds the model any more; who has found it may still be admitted."""
        self.draining = True

    def drain(self) -> None:
        """Admit nothing from now on, also once it is ready; what was accepted goes on."""
        self.draining = True
        if self._gateway is not None:
            self._gateway.close()

    def resume(self) -> None:
        """Admit again."""
        self.draining = False
        if self._gateway is not None:
            self._gateway.reopen()

    def cut(self) -> None:
        """The drain's deadline: end everything that was accepted, and admit nothing more."""
        if self._gateway is not None:
            self._gateway.cut()

    async def idle(self) -> None:
        """Wait until everything accepted has ended."""
        if self._gateway is not None:
            await self._gateway.idle()

    async def delivered(self) -> None:
        """Wait until everybody who found the model, and every consumer, has left."""
        await self._uses.none()
        if self._gateway is not None:
            await self._gateway.delivered()

    def retune(self, settings: ModelSettings, request_timeout: float) -> None:
        """Serve under other settings, of which only those that can change live differ."""
        self._settings = settings
        self._terms = Terms(settings.batch, settings.policy, request_timeout)
        if self._gateway is not None and self._served is not None:
            self._gateway.retune(self._terms)
            self._offer(self._gateway, self._served.tokenizer, self._served.capabilities)

    # --- inside

    def _serving(self) -> Served:
        if self._stage is State.FAILED:
            raise ModelNotReady(f"the model {self.id} has failed: {self.reason}")
        if self.draining:
            raise Draining(f"the model {self.id} is draining", retry_after=DRAIN_RETRY)
        if self._stage is State.READY and self._served is not None:
            return self._served
        raise ModelNotReady(f"the model {self.id} is {self._stage}", retry_after=START_RETRY)

    async def _live(self) -> None:
        try:
            folder = await self._means.locate(self._settings.source)
            async with EngineRun.open(self.id, self._settings, self._means) as self._run:
                await self._serve(self._run, folder)
        except _FAILURES as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - told in full, and it ends this model only
            # A fault of ours must not look like a start that takes for ever.
            self._log.exception("the model's life ended in an unexpected error")
            self._fail(f"unexpected {type(error).__name__}; the log says more")
        finally:
            self._run = None
            self._started.set()

    async def _serve(self, run: EngineRun, folder: Path) -> None:
        terms = self._terms
        load_tokenizer = self._means.load_tokenizer
        ready, tokenizer = await load(run, folder, self._settings, terms.tuning, load_tokenizer)
        try:
            self._own_sampling = defaults.of_model(folder)
            gateway = Gateway(ready.capabilities, terms, run.link.send, self._ledger)
            gateway.retune(self._terms)  # they may have changed while it loaded
            self._become_ready(gateway, tokenizer, ready)
            reason = "its engine process has ended"
            try:
                await run.serve(gateway)
            except (BrokenFrame, ProtocolError) as error:
                reason = f"its engine speaks nonsense: {error}"
            finally:
                # Whatever ended it, nobody waits for the process to be gone as well.
                gateway.lost(reason)
            if self._stage is State.READY:
                self._fail(reason)
                self.reason = await run.post_mortem()
                self._log.error("the engine's last words", reason=self.reason)
        finally:
            tokenizer.close()

    def _become_ready(self, gateway: Gateway, tokenizer: Tokenizer, ready: Ready) -> None:
        if self.draining:
            gateway.close()
        self._gateway = gateway
        self._offer(gateway, tokenizer, ready.capabilities)
        self._stage = State.READY
        self.was_ready = True
        self._started.set()
        self._log.info(
            "model ready",
            load_seconds=round(ready.load_seconds, 2),
            warmup_seconds=round(ready.warmup_seconds, 2),
            serial_only=ready.capabilities.serial_only,
        )

    def _offer(self, gateway: Gateway, tokenizer: Tokenizer, capabilities: Capabilities) -> None:
        self._served = Served(
            id=self.id,
            capabilities=capabilities,
            tokenizer=tokenizer,
            sampling=defaults.merge(self._settings.sampling, self._own_sampling),
            gateway=gateway,
        )
        tell_unbatchable(self._log, self._settings.policy, capabilities)

    def _fail(self, reason: str) -> None:
        if self._stage is State.STOPPED:
            return  # an engine that is sent away may well complain
        self._stage = State.FAILED
        self.reason = reason
        self._log.error("model failed", reason=reason)
