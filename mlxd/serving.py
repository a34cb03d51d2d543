"""The ports that HTTP acts through: what a request is, and what serves it.

`mlxd.http` knows these Protocols only. `mlxd.gateway` and `mlxd.supervisor`
fulfil them; tests use small fakes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mlxd.wire import Capabilities, Lane, Sampling, Token

if TYPE_CHECKING:
    from mlxd.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is; what its API key says."""

    name: str | None = None  # None = nobody was asked for a key
    weight: float = 1.0  # share of a model's waiting line, beside other callers
    max_priority: int = 0


#: Every caller of a daemon without API keys.
ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class Generation:
    """One validated generation request, in tokens."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    eos: frozenset[int]
    sampling: Sampling
    traits: frozenset[str]  # of SPEC 1, as found by mlxd.policy.request_traits
    caller: Caller = ANYBODY
    priority: int = 0  # higher first; at most the caller's own highest


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets where its client sends nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each part of a request's life; None for those that it did not come to."""

    admitted: float  # moment on the event loop's clock
    queue: float | None = None  # from there to its row
    prefill: float | None = None  # to its first token
    decode: float | None = None  # to its last


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as the client and the metrics are told."""

    # "stop" | "length" | "tool_calls" | "cancelled" | "error" | "drained"
    name: str
    finish_reason: str  # the protocol-neutral one: "stop" | "length" | "tool_calls"
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings | None = field(default=None, compare=False)  # no two requests take as long


class Ticket(Protocol):
    """An admitted request: an async iterator of token batches.

    It frees its place when its context exits, whatever the reason: leaving
    before the end cancels the row. Iteration stops after the row's end, and
    `outcome` is set from then on; once the context has exited it always is.

    Iteration raises:
        TimedOut: `server.request_timeout` passed while it still waited.
        Draining: it was still waiting when the drain's deadline came.
        EngineFailed: the engine died, or the step failed.
    """

    lane: Lane
    reason: str

    def __aiter__(self) -> AsyncIterator[list[Token]]: ...

    def end(self, finish_reason: str, completion_tokens: int) -> None:
        """The text layer found the end (a stop string) at this token count.

        Cancels the row if it still runs; tokens past the count are counted
        as discarded. Iteration stops.
        """

    @property
    def outcome(self) -> Outcome:
        """The end. Raises RuntimeError while the request runs."""


class Gateway(Protocol):
    """One model's admission, daemon side."""

    def admit(self, generation: Generation) -> AbstractAsyncContextManager[Ticket]:
        """Take a place in the model's waiting order.

        Raises, on entering:
            BadRequest: a trait of the request is rejected by policy.
            QueueFull, Draining, ModelNotReady: nothing was taken.
        """
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can take requests now."""

    id: str
    capabilities: Capabilities
    tokenizer: Tokenizer
    sampling: SamplingDefaults
    gateway: Gateway


@dataclass(frozen=True, slots=True)
class Identity:
    """A model of the configuration, whether or not it serves."""

    id: str
    created: int  # unix seconds


class Directory(Protocol):
    """Which models there are. The supervisor is one."""

    def model_ids(self) -> Sequence[str]:
        """Ids in the file's order, aliases not included."""
        ...

    def identify(self, name: str) -> Identity:
        """The model of this id or alias, whatever its state.

        Raises:
            NotFound: no such model.
        """
        ...

    def using(self, name: str) -> AbstractContextManager[Served]:
        """The model of this id or alias, on the way to a place in its line.

        A model that is replaced meanwhile goes on until the context exits. A domain
        error that leaves the context is counted as a request that this model refused.

        Raises:
            NotFound: no such model; nothing is ever loaded because of a request.
            ModelNotReady, Draining: on entering; it exists but cannot serve now.
        """
        ...

    def ready(self, name: str | None = None) -> bool:
        """Whether the daemon, or one model, should be sent traffic.

        Raises:
            NotFound: `name` is no model.
        """
        ...
