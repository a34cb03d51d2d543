"""A gateway whose engine is a list of frames, driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from mlxd import serving
from mlxd.config import BatchSettings, PolicySettings
from mlxd.gateway import Gateway
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.gateway.ticket import Ticket
from mlxd.lifecycle import State
from mlxd.metrics import Metrics
from mlxd.metrics.model import ModelMetrics
from mlxd.policy import TRAITS
from mlxd.serving import ANYBODY, Caller, Generation
from mlxd.wire import (
    Cancel,
    Capabilities,
    Finished,
    FinishReason,
    Lane,
    Sampling,
    Started,
    Step,
    Submit,
    ToEngine,
    Token,
)

MODEL = "tiny"
EVERYTHING = Capabilities(
    vocab_size=256,
    context=1024,
    cache_classes=["KVCache"],
    serial_only=None,
    batchable=list(TRAITS),
)


def generation(
    name: str = "r",
    *,
    traits: Sequence[str] = (),
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 100,
    caller: Caller = ANYBODY,
) -> Generation:
    """A request with this id."""
    return Generation(
        request_id=name,
        prompt=prompt,
        max_tokens=max_tokens,
        eos=frozenset({0}),
        sampling=Sampling(seed=7),
        traits=frozenset(traits),
        caller=caller,
    )


def terms(
    policy: PolicySettings | None = None,
    *,
    width: int = 2,
    queue: int = 8,
    request_timeout: float = 60.0,
) -> Terms:
    """Terms with a small batch."""
    batch = BatchSettings(width=width, queue=queue)
    return Terms(batch, policy or PolicySettings(), request_timeout)


class Bench:
    """A gateway, its metrics, and a hand on the engine's side."""

    def __init__(self, agreed: Terms, capabilities: Capabilities = EVERYTHING) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.metrics.add(MODEL, self)
        self.sent: list[ToEngine] = []
        self.model_metrics = ModelMetrics(self.metrics, MODEL)
        ledger = Ledger(self.model_metrics)
        self.gateway = Gateway(agreed, ledger)
        self.gateway.attach(capabilities, agreed.tuning, self.sent.append)

    # the figures that a host gives

    width = 2
    state = State.READY
    draining = False

    @property
    def prefix_cache_bytes(self) -> int:
        """As a host has it."""
        return self.gateway.prefix_cache_bytes

    @property
    def kv_bytes(self) -> int:
        """As the engine said."""
        return self.gateway.kv_bytes

    @property
    def kv_budget(self) -> int:
        """As the gateway was told."""
        return self.gateway.kv_budget or 0

    def running(self, lane: Lane) -> int:
        """Of the gateway."""
        return self.gateway.running(lane)

    def waiting(self, lane: Lane) -> int:
        """Of the gateway."""
        return self.gateway.waiting(lane)

    # what the engine got, and says

    def submitted(self) -> list[int]:
        """Ids that were handed over, in order."""
        return [frame.id for frame in self.sent if isinstance(frame, Submit)]

    def cancelled(self) -> list[int]:
        """Ids that were given up, in order."""
        return [frame.id for frame in self.sent if isinstance(frame, Cancel)]

    def start(self, *tickets: Ticket) -> None:
        """The engine begins with these."""
        for ticket in tickets:
            self.gateway.started(Started(ticket.id))

    def step(self, ticket: Ticket, *tokens: int) -> None:
        """The engine gives these tokens, one a step."""
        for token in tokens:
            step = Step(ticket.lane, 1, 0.01, [Token(ticket.id, token)], kv_bytes=64)
            self.gateway.stepped(step)

    def finish(
        self,
        ticket: Ticket,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        generated: int = 0,
        discarded: int = 0,
        prefilled: int = 0,
        error: str | None = None,
    ) -> None:
        """The engine ends this one."""
        self.gateway.finished(
            Finished(
                id=ticket.id,
                reason=reason,
                prompt_tokens=len(ticket.generation.prompt),
                cached_tokens=0,
                generated_tokens=generated,
                discarded_tokens=discarded,
                prefill_seconds=0.1,
                decode_seconds=0.2,
                error=error,
                prefilled_tokens=prefilled,
            )
        )

    def value(self, name: str, **labels: str) -> float:
        """A series of this model; fails where it does not exist."""
        value = self.registry.get_sample_value(name, {"model": MODEL, **labels})
        assert value is not None, f"no series {name} {labels}"
        return value

    def outcomes(self) -> dict[str, float]:
        """Requests by outcome, both lanes together, without the zeros."""
        found: dict[str, float] = {}
        for metric in self.metrics.requests.collect():
            for sample in metric.samples:
                if sample.value:
                    outcome = sample.labels["outcome"]
                    found[outcome] = found.get(outcome, 0) + sample.value
        return found


async def read(ticket: serving.Ticket) -> list[int]:
    """All tokens of a ticket, to its end."""
    return [token.token async for batch in ticket for token in batch]


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within: float = 10) -> None:
    """Wait for what only shows from outside: a process, its status, its series."""
    async with asyncio.timeout(within):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process that may be nobody's child still runs; the unreaped do not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
