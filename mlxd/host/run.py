"""One run of an engine: its start, what it says of itself, its frames, its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from mlxd import blas
from mlxd.config import ModelSettings
from mlxd.gateway import Gateway, ProtocolError
from mlxd.host.lastwords import cause
from mlxd.host.link import EngineLink, engine_environment
from mlxd.host.restarts import RestartPolicy
from mlxd.host.scratch import scratch
from mlxd.host.watchdog import Watchdog, WatchPolicy
from mlxd.memory import MemoryBudget
from mlxd.metrics import Metrics
from mlxd.operations import EngineStatus, PhaseStatus
from mlxd.text.tokenizer import Tokenizer
from mlxd.wire import (
    BatchTuning,
    Finished,
    FinishReason,
    Held,
    Hello,
    LoadFailed,
    Phase,
    Preempted,
    Ready,
    Start,
    Started,
    Step,
    Submit,
    ToDaemon,
    ToEngine,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

#: Ends of requests that an engine which works comes to.
_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class CannotServe(Exception):
    """The model cannot be served, and another engine would not change that; says why."""


class EngineDied(Exception):
    """The engine is gone; its post-mortem says why."""


#: Takes a model's folder and whether its own code may be run; raises TokenizerError.
TokenizerLoader = Callable[[Path, bool], Coroutine[Any, Any, Tokenizer]]


@dataclass(frozen=True, slots=True)
class Means:
    """What every model is given to run with."""

    engine_command: Sequence[str]
    environment: Mapping[str, str]  # the daemon's own
    cache: Path
    locate: Callable[[str], Awaitable[Path]]  # a source's local folder; raises FetchFailed
    load_tokenizer: TokenizerLoader
    metrics: Metrics
    restarts: RestartPolicy
    watch: WatchPolicy
    memory: MemoryBudget


class EngineRun:
    """One engine process and what it has said of itself."""

    def __init__(
        self,
        model: str,
        blas_choice: str,
        link: EngineLink,
        watch: WatchPolicy,
        requests: Callable[[], int],
    ) -> None:
        self.link = link
        self.worked = False  # it has finished a request by itself
        self._ready_at: float | None = None
        self._frames = link.frames()
        self._hello: Hello | None = None
        self._phase: tuple[Phase, float] | None = None  # and when it was said
        self._blas_choice = blas_choice
        self._log = log.bind(model=model, pid=link.pid)
        self._hung: str | None = None
        self._watchdog = Watchdog(self._hang, asyncio.get_running_loop(), watch, requests=requests)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str, settings: ModelSettings, means: Means, requests: Callable[[], int]
    ) -> AsyncIterator[EngineRun]:
        """Start the process; leaving the context ends it, if it has not ended.

        Args:
            requests: how many the engine has that have not finished.

        Raises:
            OSError: the command cannot be run, or the cache cannot be written.
        """
        with scratch(means.cache / "engines" / model) as folder:
            environment = await asyncio.to_thread(_environment, folder, settings, means)
            link = await EngineLink.open(model, means.engine_command, environment)
            run = cls(model, settings.blas, link, means.watch, requests)
            try:
                yield run
            finally:
                run._watchdog.stop()
                await run._frames.aclose()
                await link.ended()

    async def load(self, folder: Path, settings: ModelSettings, tuning: BatchTuning) -> Ready:
        """Have the model loaded and warmed up.

        Raises:
            CannotServe: the engine says so.
            EngineDied: the process is gone.
        """
        self.link.send(
            Start(
                model_path=str(folder),
                dtype=settings.dtype,
                context=settings.context,
                trust_remote_code=settings.trust_remote_code,
                batch=tuning,
                attention=settings.attention,
                kernels=settings.kernels,
                kv_bits=settings.batch.kv_bits,
            )
        )
        async for frame in self._heard():
            match frame:
                case Hello() | Phase():
                    self._note(frame)
                case Ready():
                    self._ready_at = time.monotonic()
                    return frame
                case LoadFailed():
                    raise CannotServe(frame.message)
                case _:
                    raise ProtocolError(f"{type(frame).__name__} from an engine that still loads")
        raise EngineDied

    async def serve(self, gateway: Gateway) -> None:
        """Pass on what the engine says, until it is gone.

        Raises:
            BrokenFrame, ProtocolError: what it says makes no sense.
        """
        async for frame in self._heard():
            self._pass_on(frame, gateway)

    def send(self, frame: ToEngine) -> None:
        """Hand over a frame without waiting."""
        if isinstance(frame, Submit):
            self._watchdog.handed()
        self.link.send(frame)

    async def post_mortem(self) -> str:
        """Why the process ended, as far as it can be known. Waits, briefly, for its end."""
        status = await self.link.ended()
        if self._hung is not None:
            return f"the engine hung: {self._hung}"
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        told = cause(self.words)
        return f"the engine ended with {how}" + (f": {told}" if told else "")

    @property
    def end(self) -> str:
        """Why it serves no more, as far as that is known at once."""
        return "its process has ended" if self._hung is None else "it made no progress"

    @property
    def words(self) -> tuple[str, ...]:
        """The last lines that it printed."""
        return self.link.last_words

    @property
    def served(self) -> float:
        """Seconds since it was ready, 0 where it was not."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def engine(self) -> EngineStatus | None:
        """Who it is; None before its first frame."""
        if self._hello is None:
            return None
        hello = self._hello
        return EngineStatus(hello.pid, hello.device, hello.mlx, hello.mlx_lm, hello.blas)

    def phase(self) -> PhaseStatus | None:
        """What it is doing; None before it said so."""
        if self._phase is None:
            return None
        phase, since = self._phase
        seconds = round(time.monotonic() - since, 3)
        return PhaseStatus(phase.name, seconds, phase.budget)

    async def _heard(self) -> AsyncIterator[ToDaemon]:
        async for frame in self._frames:
            self._watchdog.heard(frame)
            yield frame

    def _hang(self, what: str) -> None:
        self._log.error("engine hangs", what=what)
        self._hung = what
        self.link.abort()

    def _pass_on(self, frame: ToDaemon, gateway: Gateway) -> None:
        match frame:
            case Step():
                gateway.stepped(frame)
            case Held():
                gateway.held(frame)
            case Started():
                gateway.started(frame)
            case Preempted():
                gateway.preempted(frame)
            case Finished():
                gateway.finished(frame)
                self.worked |= frame.reason in _BY_ITSELF
            case Phase():
                self._note(frame)
            case _:
                raise ProtocolError(f"{type(frame).__name__} from an engine that is ready")

    def _note(self, frame: Hello | Phase) -> None:
        if isinstance(frame, Phase):
            self._phase = frame, time.monotonic()
            return
        self._hello = frame
        self._log.info("engine started", device=frame.device, blas=frame.blas.name)
        if frame.blas.name == "reference" and self._blas_choice != "none":
            self._log.warning(blas.ADVICE)


def _environment(folder: Path, settings: ModelSettings, means: Means) -> dict[str, str]:
    """Looks for libraries."""
    library = blas.find(settings.blas)
    return engine_environment(
        means.environment,
        scratch=folder,
        blas=blas.environment(library, means.environment.get("LD_PRELOAD")),
        model=settings.env,
    )
