"""One model, as requests, operators and metrics see it: a facade of its life and its gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlxd.config import ModelSettings
from mlxd.errors import Draining, MlxdError, ModelNotReady
from mlxd.gateway import DRAIN_RETRY, ENGINE_RETRY, Gateway
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.gateway.ticket import Ticket
from mlxd.holds import Holds
from mlxd.host.life import Life
from mlxd.host.run import Means
from mlxd.lifecycle import State
from mlxd.metrics.model import ModelMetrics
from mlxd.operations import LaneCounts, LiveRequests, ModelStatus, RequestStatus
from mlxd.serving import Served
from mlxd.wire import ClearCache, Lane


class Host:
    """One model, from its start to its end; a model that changes gets a new host."""

    def __init__(
        self, model_id: str, settings: ModelSettings, request_timeout: float, means: Means
    ) -> None:
        self.id = model_id
        self.created = int(time.time())
        self.draining = False
        self._settings = settings
        self._terms = Terms(settings.batch, settings.policy, request_timeout)
        self._means = means
        self._uses = Holds()  # by those who have found the model and are not admitted yet
        means.metrics.add(model_id, self)
        self._ledger = Ledger(ModelMetrics(means.metrics, model_id))
        self._gateway = Gateway(self._terms, self._ledger)
        self._life = Life(model_id, settings, self._terms, self._gateway, self._ledger, means)
        self._living: asyncio.Task[None] | None = None

    # --- its life

    def start(self, *, patient: bool = True) -> None:
        """Begin to fetch and load; `started` tells when that is over.

        Args:
            patient: whether an engine that dies while it loads is followed by another.
        """
        self._living = asyncio.create_task(self._life.live(patient=patient), name=f"host {self.id}")

    async def started(self) -> bool:
        """Wait until the model was ready, or cannot be. Returns whether it is ready."""
        await self._life.settled.wait()
        return self._life.stage is State.READY

    async def stop(self) -> None:
        """End the engine, whatever it does, and release everything."""
        if self._living is None:
            return
        serves = self._life.stage is State.READY
        self._life.end()
        run = self._life.run
        if serves and run is not None:
            await run.link.stop()
        else:
            self.terminate()
            self._living.cancel()
        await asyncio.wait([self._living])

    def terminate(self) -> None:
        """Send the engine away without asking it and without waiting."""
        if self._life.run is not None:
            self._life.run.link.terminate()

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
        if self.draining and self._life.stage is State.READY:
            return State.DRAINING
        return self._life.stage

    @property
    def reason(self) -> str | None:
        """Why it failed, or starts again."""
        return self._life.reason

    @property
    def was_ready(self) -> bool:
        """Whether it could ever serve."""
        return self._life.was_ready

    @property
    def width(self) -> int:
        """Rows that may decode together."""
        return self._terms.batch.width

    @property
    def engine_bytes(self) -> int:
        """Bytes of weights and of work that its engine takes, KV left out; 0 while unknown."""
        loaded = self._life.loaded
        return 0 if loaded is None else loaded.weight_bytes + loaded.working_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the engine holds."""
        return self._gateway.kv_bytes

    @property
    def kv_budget(self) -> int:
        """Bytes that KV and prefix cache may take; 0 before an engine was ready."""
        return self._gateway.kv_budget or 0

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the engine's prefix cache."""
        return self._gateway.prefix_cache_bytes

    def running(self, lane: Lane) -> int:
        """Requests that hold a row."""
        return self._gateway.running(lane)

    def waiting(self, lane: Lane) -> int:
        """Accepted requests that hold no row yet."""
        return self._gateway.waiting(lane)

    def live(self) -> LiveRequests:
        """What it still has to finish."""
        return self._gateway.live()

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
        run, loaded = self._life.run, self._life.loaded
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
            capabilities=None if loaded is None else loaded.capabilities,
            kv_bytes=self.kv_bytes,
            kv_budget_bytes=self.kv_budget,
            prefix_cache_bytes=self.prefix_cache_bytes,
            peak_bytes=self._gateway.peak_bytes,
            weight_bytes=0 if loaded is None else loaded.weight_bytes,
            working_bytes=0 if loaded is None else loaded.working_bytes,
            restarts=self._life.restarts,
        )

    def requests(self) -> list[RequestStatus]:
        """Those that have not ended."""
        now = asyncio.get_running_loop().time()
        return [_request_status(self.id, ticket, now) for ticket in self._gateway.requests()]

    # --- what an operator wants of it

    def cancel(self, request_id: str) -> int:
        """End the requests of this id; returns how many."""
        return self._gateway.withdraw(request_id)

    def clear_cache(self) -> None:
        """Have the engine forget the prompts that it keeps."""
        self._gateway.tell(ClearCache())

    def retire(self) -> None:
        """Nobody finds the model any more; who has found it may still be admitted."""
        self.draining = True

    def drain(self) -> None:
        """Admit nothing from now on, also once it is ready; what was accepted goes on."""
        self.draining = True
        self._gateway.close()

    def resume(self) -> None:
        """Admit again."""
        self.draining = False
        self._gateway.reopen()

    def cut(self) -> None:
        """The drain's deadline: end everything that was accepted, and admit nothing more."""
        self._gateway.cut()

    async def idle(self) -> None:
        """Wait until everything accepted has ended."""
        await self._gateway.idle()

    async def delivered(self) -> None:
        """Wait until everybody who found the model, and every consumer, has left."""
        await self._uses.none()
        await self._gateway.delivered()

    def retune(self, settings: ModelSettings, request_timeout: float) -> None:
        """Serve under other settings, of which only those that can change live differ."""
        self._settings = settings
        self._terms = Terms(settings.batch, settings.policy, request_timeout)
        self._life.retune(settings, self._terms)

    # --- inside

    def _serving(self) -> Served:
        stage, served = self._life.stage, self._life.served
        if stage is State.FAILED:
            # Why is for operators: an engine's last words may name paths of this machine.
            raise ModelNotReady(f"the model {self.id} has failed")
        if self.draining:
            raise Draining(f"the model {self.id} is draining", retry_after=DRAIN_RETRY)
        if stage is State.READY and served is not None:
            return served
        raise ModelNotReady(f"the model {self.id} is {stage}", retry_after=ENGINE_RETRY)


def _request_status(model: str, ticket: Ticket, now: float) -> RequestStatus:
    return RequestStatus(
        id=ticket.generation.request_id,
        model=model,
        caller=ticket.generation.caller.name,
        lane=ticket.lane,
        reason=ticket.reason,
        state="running" if ticket.runs else "waiting",
        seconds=round(now - ticket.times.accepted, 3),
        prompt_tokens=len(ticket.generation.prompt),
        generated_tokens=ticket.received,
    )
