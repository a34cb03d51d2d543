"""Both lanes of one model, decided without a clock and without MLX.

The scheduler turns submissions into rows, and acts only through its `Runner`.
Its decisions depend on the messages it got and on step counts, so a test is a
script of events, and every rank of a sharded model would decide the same.

One `step()` is one iteration: admit, enqueue prefill chunks, enqueue a decode
step, read the tokens of the step before. The order of the waiting line is
the gateway's; it is never changed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlxd.engine.prefill import Chunk
from mlxd.wire import (
    BatchTuning,
    Cancel,
    Finished,
    FinishReason,
    Lane,
    Started,
    Step,
    Submit,
    Token,
    TokenLogprobs,
)

Event = Started | Step | Finished
#: What the serial lane yields: None after a prefill chunk, then tokens.
SerialSteps = Iterator[tuple[int, TokenLogprobs | None] | None]


class Runner(Protocol):
    """What the scheduler can do. `mlxd.engine.runner.Runner` does it with MLX."""

    width: int
    #: Steps to enqueue beyond the one being read; 0 where enqueuing itself waits.
    ahead: int

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Enqueue these chunks of different rows."""

    def seat(self, row: int, request: Submit) -> None:
        """Give a fully prefilled row its slot; it decodes from the next step on."""

    def decode(self, rows: Sequence[int]) -> None:
        """Enqueue one step of these seated rows."""

    def collect(self) -> list[tuple[int, int]]:
        """Wait for the oldest enqueued step: (row, token), rows released since included."""
        ...

    def release(self, row: int) -> None:
        """Drop a row's state and slot, in whatever phase it is."""

    def serial(self, request: Submit, chunk: int) -> SerialSteps:
        """Run one request alone."""
        ...

    def reset(self) -> None:
        """Drop everything after a failure."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of all rows' state."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """A request from its admission to its end."""

    request: Submit
    began: float
    prefilled: int = 0  # prompt tokens whose state exists or is on its way
    enqueued: int = 0  # decode steps enqueued
    generated: int = 0  # tokens read
    decoding_since: float | None = None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def to_prefill(self) -> int:
        """Prompt tokens left; the last one is fed to the first decode step."""
        return len(self.request.prompt) - 1 - self.prefilled


@dataclass(slots=True)
class _Serial:
    """The request that has the model to itself."""

    row: Row
    steps: SerialSteps


@dataclass(slots=True)
class Scheduler:
    """Owner of all rows of one engine. `clock` stamps timings and decides nothing."""

    runner: Runner
    tuning: BatchTuning
    clock: Callable[[], float]
    _waiting: deque[Submit] = field(default_factory=deque)
    _prefilling: list[Row] = field(default_factory=list)
    _decoding: list[Row] = field(default_factory=list)
    _on_the_way: deque[list[Row]] = field(default_factory=deque)
    _serial: _Serial | None = None
    _events: list[Event] = field(default_factory=list)
    _last_step: float | None = None

    # --- messages -------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        """Put a request at the end of the line."""
        self._waiting.append(request)

    def cancel(self, message: Cancel) -> None:
        """End a request in whatever phase it is. Unknown ids are ignored."""
        for request in self._waiting:
            if request.id == message.id:
                self._waiting.remove(request)
                self._events.append(_ended_waiting(request))
                return
        if self._serial is not None and self._serial.row.id == message.id:
            self._end_serial(FinishReason.CANCELLED)
            return
        for row in [*self._prefilling, *self._decoding]:
            if row.id == message.id:
                self._end(row, FinishReason.CANCELLED)
                return

    def retune(self, tuning: BatchTuning) -> None:
        """Take new batch settings; rows that run stay, also above a smaller width."""
        self.tuning = tuning
        self.runner.width = max(tuning.width, len(self._decoding) + len(self._prefilling))

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (
            self._waiting
            or self._prefilling
            or self._decoding
            or self._on_the_way
            or self._serial
            or self._events
        )

    @property
    def activity(self) -> str:
        """What the next step will spend its time on, for `Phase`."""
        if self._serial is not None:
            return "serial"
        return "prefill" if self._prefilling else "step"

    # --- one iteration --------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one iteration; the events since the last one, in order."""
        if self._last_step is None:
            self._last_step = self.clock()
        try:
            if self._serial is None:
                self._admit()
            if self._serial is not None:
                self._advance_serial(self._serial)
            else:
                self._advance_batch()
        except Exception as error:  # noqa: BLE001  # whatever failed, only this step's rows may pay
            self._fail(error)
        events, self._events = self._events, []
        if self.idle:
            self._last_step = None
        return events

    def _admit(self) -> None:
        """Start requests from the head of the line.

        1. A serial request at the head stops admission until the batch is empty,
           then it has the model to itself.
        2. A batch request starts while fewer than `width` rows run.
        """
        while self._waiting:
            running = len(self._prefilling) + len(self._decoding)
            request = self._waiting[0]
            if request.lane is Lane.SERIAL:
                if running or self._on_the_way:
                    return
                row = self._start(self._waiting.popleft())
                steps = self.runner.serial(request, self.tuning.prefill_chunk)
                self._serial = _Serial(row, steps)
                return
            if running >= self.tuning.width:
                return
            row = self._start(self._waiting.popleft())
            if row.to_prefill:
                self._prefilling.append(row)
            else:
                self._seat(row)

    def _advance_batch(self) -> None:
        if self._prefilling and self._on_the_way:
            # A prefill call can take its whole time here: tokens that are ready go first.
            self._collect(leave=0)
            return
        self._prefill()
        rows = [row for row in self._decoding if row.enqueued < row.request.max_tokens]
        if rows:
            self.runner.decode([row.id for row in rows])
            for row in rows:
                row.enqueued += 1
            self._on_the_way.append(rows)
        self._collect(leave=self.runner.ahead if rows and not self._prefilling else 0)

    def _prefill(self) -> None:
        """Enqueue this iteration's share of prompts and seat the rows that are through."""
        planned = self._plan_prefill()
        if not planned:
            return
        self.runner.prefill([chunk for _row, chunk in planned])
        for row, chunk in planned:
            row.prefilled += len(chunk.tokens)
            if chunk.last:
                self._prefilling.remove(row)
                self._seat(row)

    def _plan_prefill(self) -> list[tuple[Row, Chunk]]:
        """At most one chunk per row, in order, within the budget.

        A prompt that fits in one chunk is not cut to use up the budget: whole
        ones can be computed together.
        """
        budget = self.tuning.prefill_budget
        planned: list[tuple[Row, Chunk]] = []
        for row in self._prefilling:
            size = min(row.to_prefill, self.tuning.prefill_chunk)
            if planned and size > budget:
                break
            size = min(size, budget)
            start = row.prefilled
            tokens = row.request.prompt[start : start + size]
            planned.append((row, Chunk(row.id, tokens, start, last=size == row.to_prefill)))
            budget -= size
            if budget <= 0:
                break
        return planned

    def _collect(self, *, leave: int) -> None:
        """Read the steps on their way, all but the last `leave` of them."""
        while len(self._on_the_way) > leave:
            self._collect_one()

    def _collect_one(self) -> None:
        rows = {row.id: row for row in self._on_the_way.popleft()}
        tokens: list[Token] = []
        ended: list[tuple[Row, FinishReason]] = []
        for row_id, token in self.runner.collect():
            row = rows[row_id]
            if row not in self._decoding:
                continue  # it ended after this step was enqueued
            reason = _take(row, token)
            if reason is not FinishReason.STOP:
                tokens.append(Token(row_id, token))
            if reason is not None:
                ended.append((row, reason))
        self._report(Lane.BATCH, len(rows), tokens)
        for row, reason in ended:
            self._end(row, reason)

    def _advance_serial(self, serial: _Serial) -> None:
        """One prefill chunk or one token of the serial request."""
        result = next(serial.steps)
        if result is None:
            return
        row = serial.row
        if row.decoding_since is None:
            row.decoding_since = self.clock()
        token, logprobs = result
        row.enqueued += 1
        reason = _take(row, token)
        tokens = [] if reason is FinishReason.STOP else [Token(row.id, token, logprobs)]
        self._report(Lane.SERIAL, 1, tokens)
        if reason is not None:
            self._end_serial(reason)

    # --- beginnings and ends --------------------------------------------------

    def _start(self, request: Submit) -> Row:
        self._events.append(Started(request.id))
        return Row(request, self.clock())

    def _seat(self, row: Row) -> None:
        self.runner.seat(row.id, row.request)
        row.decoding_since = self.clock()
        self._decoding.append(row)

    def _end(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        (self._prefilling if row in self._prefilling else self._decoding).remove(row)
        self.runner.release(row.id)
        self._finished(row, reason, error)
        self.runner.width = max(self.tuning.width, len(self._decoding) + len(self._prefilling))

    def _end_serial(self, reason: FinishReason, error: str | None = None) -> None:
        if self._serial is not None:
            row, steps = self._serial.row, self._serial.steps
            self._serial = None
            _close(steps)
            self._finished(row, reason, error)

    def _finished(self, row: Row, reason: FinishReason, error: str | None) -> None:
        now = self.clock()
        decoding_since = now if row.decoding_since is None else row.decoding_since
        self._events.append(
            Finished(
                id=row.id,
                reason=reason,
                prompt_tokens=len(row.request.prompt),
                cached_tokens=0,
                generated_tokens=row.generated,
                discarded_tokens=row.enqueued - row.generated,
                prefill_seconds=decoding_since - row.began,
                decode_seconds=now - decoding_since,
                error=error,
            )
        )

    def _fail(self, error: Exception) -> None:
        """A step failed: everything that was in it ends with an error, the line stays."""
        text = f"{type(error).__name__}: {error}"
        self._end_serial(FinishReason.ERROR, text)
        rows = [*self._prefilling, *self._decoding]
        self._prefilling.clear()
        self._decoding.clear()
        self._on_the_way.clear()
        self.runner.reset()
        for row in rows:
            self._finished(row, FinishReason.ERROR, text)

    def _report(self, lane: Lane, rows: int, tokens: list[Token]) -> None:
        now = self.clock()
        since = now if self._last_step is None else self._last_step
        self._last_step = now
        self._events.append(Step(lane, rows, now - since, tokens, self.runner.kv_bytes))


def _take(row: Row, token: int) -> FinishReason | None:
    """Count one token of a row and say whether it ends it: end of sequence first, then length."""
    row.generated += 1
    if token in row.request.eos:
        return FinishReason.STOP
    if row.generated >= row.request.max_tokens:
        return FinishReason.LENGTH
    return None


def _close(steps: SerialSteps) -> None:
    """End the generator, so that its caches go now and not at a later collection."""
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def _ended_waiting(request: Submit) -> Finished:
    """A request that was cancelled before anything was computed for it."""
    return Finished(
        id=request.id,
        reason=FinishReason.CANCELLED,
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        generated_tokens=0,
        discarded_tokens=0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )
