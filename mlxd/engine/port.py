"""The port between deciding and doing: what the scheduler asks of a runner."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mlxd.wire import BatchTuning, FinishReason, Submit, TokenLogprobs

#: What a request is told that memory cannot hold.
NO_MEMORY = "its state does not fit into this model's share of the memory budget"

#: What the serial lane yields: None after a prefill chunk, then tokens.
SerialSteps = Generator[tuple[int, TokenLogprobs | None] | None, None, None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one row's prompt, from position `start` on. Chunks come in order, without gaps."""

    row: int
    tokens: Sequence[int]
    start: int
    last: bool  # no chunk follows


class RowFailed(Exception):
    """A request of the serial lane cannot go on, and nothing else is wrong."""

    def __init__(self, message: str, reason: FinishReason = FinishReason.ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Drawn(NamedTuple):
    """The token that a step gave a row."""

    row: int
    token: int
    logprobs: TokenLogprobs | None = None  # where the row asked
    error: str | None = None  # why its grammar cannot be followed; the token then means nothing


class Runner(Protocol):
    """What the scheduler can do. `mlxd.engine.runner.Runner` does it with MLX."""

    #: Steps to enqueue beyond the one being read; 0 where enqueuing itself waits.
    ahead: int

    def retune(self, tuning: BatchTuning) -> None:
        """Take new limits; rows that run stay, also above a smaller width."""

    def clear_cache(self) -> None:
        """Forget what the prefix cache holds."""

    def limit(self, kv_bytes: int) -> None:
        """Allocate no more for rows and the prefix cache, from now on."""

    def admits(self, tokens: int, remaining: int) -> bool:
        """Whether the state of one more row fits into memory, beside what the others need.

        Args:
            tokens: what it has to be prefilled with.
            remaining: tokens that it may be given.
        """
        ...

    def begin(self, row: int, tokens: Sequence[int], remaining: int) -> int:
        """Take what the prefix cache holds of these; the first chunk starts behind that."""
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Enqueue these chunks of different rows. Failing, it leaves other rows as they were."""

    def seat(self, row: int, request: Submit, given: Sequence[int]) -> None:
        """Give a fully prefilled row its slot; it decodes from the next step on.

        Args:
            given: tokens that it was given before a preemption; they follow the prompt.
        """

    def can_step(self, rows: Sequence[int]) -> bool:
        """Whether what one step of these seated rows allocates fits into memory."""
        ...

    def decode(self, rows: Sequence[int]) -> None:
        """Enqueue one step of these seated rows."""

    def collect(self) -> list[Drawn]:
        """Wait for the oldest enqueued step; rows released since are included."""
        ...

    def release(self, row: int) -> None:
        """Drop a row's state and slot, in whatever phase it is."""

    def serial(self, request: Submit, chunk: int) -> SerialSteps:
        """Run one request alone, while no row is seated."""
        ...

    def reset(self) -> None:
        """Drop everything after a failure."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether `begin` finds what it can of prompts that were seated before."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of all rows' state."""
        ...

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the prefix cache."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at any one time, weights included."""
        ...
