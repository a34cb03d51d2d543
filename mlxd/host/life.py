"""The course of one model: its files, its tokenizer, and one engine after another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from mlxd.config import ModelSettings, SamplingSettings
from mlxd.gateway import Gateway, ProtocolError
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms, tell_unbatchable
from mlxd.host import defaults
from mlxd.host.fetcher import FetchFailed
from mlxd.host.link import BrokenFrame
from mlxd.host.restarts import Restarts
from mlxd.host.run import CannotServe, EngineDied, EngineRun, Means
from mlxd.lifecycle import State
from mlxd.memory import NoRoom
from mlxd.serving import Served
from mlxd.text.tokenizer import Tokenizer, TokenizerError
from mlxd.wire import BatchTuning, Capabilities, Ready

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

#: What ends a model for good: told as its reason.
_FAILURES = (FetchFailed, TokenizerError, CannotServe, OSError)


class Life:
    """Fetches, loads, serves, and starts another engine when one dies.

    The one writer of where the model stands, but for `end` and `retune`; a host reads it.
    """

    def __init__(
        self,
        model_id: str,
        settings: ModelSettings,
        terms: Terms,
        gateway: Gateway,
        ledger: Ledger,
        means: Means,
    ) -> None:
        self.stage = State.STARTING
        self.reason: str | None = None  # why it failed, or starts again
        self.restarts = 0
        self.was_ready = False
        self.run: EngineRun | None = None
        self.served: Served | None = None
        self.loaded: Ready | None = None  # what the newest engine said at its readiness
        self.settled = asyncio.Event()  # it was ready once, or never will be
        self._id = model_id
        self._settings = settings
        self._terms = terms
        self._gateway = gateway
        self._ledger = ledger
        self._means = means
        self._tokenizer: Tokenizer | None = None
        self._own_sampling = SamplingSettings()
        self._log = log.bind(model=model_id)

    async def live(self, *, patient: bool) -> None:
        """From the start to the end.

        Args:
            patient: whether an engine that dies before the model was ever ready is followed by
                another, too.
        """
        try:
            folder = await self._means.locate(self._settings.source)
            await self._run_engines(folder, patient=patient)
        except _FAILURES as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - told in full, and it ends this model only
            # A fault of ours must not look like a start that takes for ever.
            self._log.exception("the model's life ended in an unexpected error")
            self._fail(f"unexpected {type(error).__name__}; the log says more")
        finally:
            self.run = None
            # Clients are not told why: an engine's last words may name paths of this machine.
            stopped = self.stage is State.STOPPED
            self._gateway.lost("it was stopped" if stopped else "none will follow it")
            self.settled.set()
            if self._tokenizer is not None:
                self._tokenizer.close()

    def end(self) -> None:
        """The model is not wanted any more: whatever its engine does now is no failure."""
        if self.stage is not State.FAILED:
            self.stage = State.STOPPED

    def retune(self, settings: ModelSettings, terms: Terms) -> None:
        """Serve under other settings, of which only those that can change live differ."""
        self._settings = settings
        self._terms = terms
        self._gateway.retune(terms)
        self._means.memory.grant(self, terms.batch.kv_budget)
        if self.served is not None:
            self._offer(self.served.tokenizer, self.served.capabilities)

    # --- inside

    async def _run_engines(self, folder: Path, *, patient: bool) -> None:
        restarts = Restarts(self._means.restarts)
        while True:
            async with EngineRun.open(
                self._id, self._settings, self._means, self._gateway.engine_has
            ) as run:
                self.run = run
                self.reason = await self._run_engine(run, folder)
            if self.stage is State.STOPPED:
                return
            delay = restarts.died(served=run.served, worked=run.worked)
            if not (patient or self.was_ready):
                raise CannotServe(self.reason)
            if delay is None:
                raise CannotServe(f"{self.reason}; it was started too often")
            self._log.error("engine died", reason=self.reason, restart_in=delay, words=run.words)
            await asyncio.sleep(delay)
            self.restarts += 1
            self._ledger.restarted()

    async def _run_engine(self, run: EngineRun, folder: Path) -> str:
        """Have it load and serve until it is gone, and say why it is."""
        try:
            await self._load(run, folder)
            await run.serve(self._gateway)
        except (BrokenFrame, ProtocolError) as error:
            return f"the engine speaks nonsense: {error}"
        except EngineDied:
            pass
        finally:
            # Whatever ended it, nobody waits for the process to be gone as well.
            if self.stage is not State.STOPPED:
                self.stage = State.STARTING
            self._gateway.detach(run.end)
            self._means.memory.leave(self)
        return await run.post_mortem()

    async def _load(self, run: EngineRun, folder: Path) -> None:
        """Load the model and, the first time, its tokenizer beside it; the first to fail ends
        the other.
        """
        tuning = self._terms.tuning
        try:
            async with asyncio.TaskGroup() as both:
                loading = both.create_task(run.load(folder, self._settings, tuning))
                if self._tokenizer is None:
                    both.create_task(self._load_tokenizer(folder))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._become_ready(run, tuning, loading.result())

    async def _load_tokenizer(self, folder: Path) -> None:
        trusted = self._settings.trust_remote_code
        self._tokenizer = await self._means.load_tokenizer(folder, trusted)
        self._own_sampling = defaults.of_model(folder)

    def _become_ready(self, run: EngineRun, tuning: BatchTuning, ready: Ready) -> None:
        assert self._tokenizer is not None  # noqa: S101 - it was loaded beside the first engine
        if self.served is not None and self.served.capabilities != ready.capabilities:
            # What waits was checked against the capabilities of the one before.
            raise CannotServe("it came back as another model: its files have changed")
        # Before it can have rows: it must know its share, and the others theirs.
        try:
            self._means.memory.join(self, ready, self._terms.batch.kv_budget, self._gateway.allow)
        except NoRoom as error:
            raise CannotServe(str(error)) from error
        self.loaded = ready
        self._offer(self._tokenizer, ready.capabilities)
        self._gateway.attach(ready.capabilities, tuning, run.send)
        self.stage = State.READY
        self.reason = None
        self.was_ready = True
        self.settled.set()
        self._log.info(
            "model ready",
            load_seconds=round(ready.load_seconds, 2),
            warmup_seconds=round(ready.warmup_seconds, 2),
            serial_only=ready.capabilities.serial_only,
        )

    def _offer(self, tokenizer: Tokenizer, capabilities: Capabilities) -> None:
        self.served = Served(
            id=self._id,
            capabilities=capabilities,
            tokenizer=tokenizer,
            sampling=defaults.merge(self._settings.sampling, self._own_sampling),
            gateway=self._gateway,
        )
        tell_unbatchable(self._log, self._settings.policy, capabilities)

    def _fail(self, reason: str) -> None:
        if self.stage is State.STOPPED:
            return  # an engine that is sent away may well complain
        self.stage = State.FAILED
        self.reason = reason
        self._log.error("model failed", reason=reason)
