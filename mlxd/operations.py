"""The port that the admin API acts through, and the facts that it answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlxd.config import LiveTable
from mlxd.plan import Plan
from mlxd.wire import Blas, Capabilities


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Requests by lane."""

    batch: int = 0
    serial: int = 0


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """What the engine said it is doing."""

    name: str
    seconds: float  # since it said so
    budget: float | None  # seconds that it may take; None while idle


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The process behind a model, from its first frame on."""

    pid: int
    device: str
    mlx: str
    mlx_lm: str
    blas: Blas


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one moment."""

    id: str
    aliases: Sequence[str]
    source: str
    state: str
    reason: str | None  # why it failed
    width: int
    running: LaneCounts
    waiting: LaneCounts
    phase: PhaseStatus | None
    engine: EngineStatus | None
    capabilities: Capabilities | None  # from its readiness on
    kv_bytes: int
    kv_budget_bytes: int  # for both of them; 0 before it was ready
    prefix_cache_bytes: int
    peak_bytes: int  # the most that the engine held since its readiness, weights included
    weight_bytes: int
    working_bytes: int  # what a step or a chunk of prefill takes beside weights and KV
    restarts: int


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """Everything at one moment."""

    state: Literal["starting", "ready", "draining", "stopping", "unavailable"]
    version: str
    config_etag: str
    reloading: bool
    models: Sequence[ModelStatus]


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """What a model still has to finish."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a drain has come."""

    state: Literal["drained", "draining"]
    models: Mapping[str, LiveRequests] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is in force. Secrets are masked."""

    etag: str
    settings: Mapping[str, object]  # as the file's tables
    differs_from_file: Sequence[str]  # keys that were changed live


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request that has not ended."""

    id: str  # of the response's x-request-id
    model: str
    caller: str | None  # name of its API key
    lane: str
    reason: str
    state: Literal["waiting", "running"]
    seconds: float  # since it was admitted
    prompt_tokens: int
    generated_tokens: int


class Operations(Protocol):
    """What an operator can do. The supervisor fulfils it.

    A change (reload, patch, load, unload, restart) that was asked for is made, also where
    whoever asked is cancelled meanwhile.
    """

    def status(self) -> DaemonStatus:
        """One consistent snapshot."""

    async def drain(self, model: str | None, *, timeout: float | None, wait: bool) -> DrainReport:
        """Stop admitting and let what was accepted finish; nothing is ever cut.

        Args:
            model: id or alias; None = all.
            timeout: seconds to wait; None = `server.drain_timeout`.
            wait: False = return at once.

        Raises:
            NotFound: no such model.
            Conflict: it was resumed before it had drained.
        """

    def resume(self, model: str | None) -> DaemonStatus:
        """Admit again.

        Raises:
            NotFound: no such model.
            Conflict: the daemon is stopping.
        """

    async def reload(self, *, dry_run: bool) -> Plan:
        """Read the configuration again and, unless `dry_run`, apply the plan.

        Raises:
            ConfigError: with every problem; nothing has changed.
            Conflict: the daemon is stopping.
        """

    def config(self) -> Configuration:
        """What is in force, and where it differs from the file."""

    async def patch(
        self,
        model: str,
        table: LiveTable,
        changes: Mapping[str, object],
        match: Sequence[str] | None,
    ) -> Configuration:
        """Change a model's settings live; the file is not written.

        Args:
            match: etags of which the configuration in force must have one; None = any.

        Raises:
            NotFound: no such model.
            PreconditionFailed: it has another etag.
            ConfigError: with every problem; nothing has changed.
            Conflict: the daemon is stopping.
        """

    async def load(self, model: str) -> ModelStatus:
        """Start a model that is stopped or has failed; returns when it serves.

        Raises:
            NotFound: no such model.
            ConfigError: it has failed again; says why.
            Conflict: it is neither stopped nor failed, it was stopped while it loaded, or the
                daemon is stopping.
        """

    async def unload(self, model: str) -> ModelStatus:
        """Drain a model up to `drain_timeout`, cut what is left, and end its engine.

        Raises:
            NotFound: no such model.
            Conflict: the daemon is stopping.
        """

    async def restart(self, model: str) -> ModelStatus:
        """Give a model a new engine, and let the old one finish what it has.

        Raises:
            NotFound: no such model.
            ConfigError: the new one does not start; the old one goes on.
            Conflict: the daemon is stopping.
        """

    def clear_cache(self, model: str) -> None:
        """Forget the prompts that a model's engine keeps. Raises NotFound."""

    def requests(self) -> Sequence[RequestStatus]:
        """Who runs and who waits."""

    def cancel(self, request_id: str) -> int:
        """End the requests of this id; returns how many. Raises NotFound for none."""
