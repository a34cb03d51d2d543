"""Both lanes of one model, decided without a clock and without MLX.

The scheduler turns submissions into rows, and acts only through its `Runner`.
Its decisions depend on the messages it got and on step counts, so that a test is a
script of events.

One `step()` is one iteration: admit, enqueue prefill chunks, enqueue a decode
step, read the tokens of the step before. The order of the waiting line is
the gateway's; it is never changed here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxd.engine import budgets
from mlxd.engine.pace import SMALLEST, Pace
from mlxd.engine.port import Chunk, RowFailed, Runner, SerialSteps
from mlxd.engine.rows import Row, ended_waiting
from mlxd.wire import (
    BatchTuning,
    Cancel,
    Finished,
    FinishReason,
    Lane,
    Phase,
    Started,
    Step,
    Submit,
    Token,
)

Event = Started | Step | Finished

#: Steps that fail in a row before the engine is given up.
FAILED_STEPS = 3


@dataclass(slots=True)
class Scheduler:
    """Owner of all rows of one engine.

    Args:
        pace: what an iteration may prefill while rows decode.
        clock: stamps timings and decides nothing.
    """

    runner: Runner
    tuning: BatchTuning
    pace: Pace
    clock: Callable[[], float]
    _waiting: deque[Submit] = field(default_factory=deque)
    _prefilling: list[Row] = field(default_factory=list)
    _decoding: list[Row] = field(default_factory=list)
    _on_the_way: deque[list[Row]] = field(default_factory=deque)
    _serial: tuple[Row, SerialSteps] | None = None  # the request that has the model to itself
    _events: list[Event] = field(default_factory=list)
    _last_step: float | None = None
    _prefilled: int = 0  # prompt tokens computed, of all rows
    _failed_steps: int = 0  # in a row

    # --- messages -------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        """Put a request at the end of the line."""
        self._waiting.append(request)

    def cancel(self, message: Cancel) -> None:
        """End a request in whatever phase it is. Unknown ids are ignored."""
        for request in self._waiting:
            if request.id == message.id:
                self._waiting.remove(request)
                self._events.append(ended_waiting(request))
                return
        if self._serial is not None and self._serial[0].id == message.id:
            self._end_serial(FinishReason.CANCELLED)
            return
        for row in [*self._prefilling, *self._decoding]:
            if row.id == message.id:
                self._end(row, FinishReason.CANCELLED)
                return

    def retune(self, tuning: BatchTuning) -> None:
        """Take new batch settings; rows that run stay, also above a smaller width."""
        self.tuning = tuning
        self.runner.retune(tuning)

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._waiting or self._running or self._serial or self._events)

    @property
    def phase(self) -> Phase:
        """What the next step will spend its time on, and how much that may be."""
        name = "prefill" if self._prefilling else "step"
        due = [(chunk.start, len(chunk.tokens)) for _row, chunk in self._plan_prefill()]
        if self._serial is not None:
            row = self._serial[0]
            name, due = "serial", [(row.prefilled, min(row.to_prefill, self.tuning.prefill_chunk))]
        return Phase(name, budgets.work(self.pace, due), self._prefilled)

    @property
    def broken(self) -> bool:
        """Whether steps fail one after the other: another process may do better."""
        return self._failed_steps >= FAILED_STEPS

    @property
    def _running(self) -> bool:
        return bool(self._prefilling or self._decoding or self._on_the_way)

    # --- one iteration --------------------------------------------------------

    def step(self) -> list[Event]:
        """Run one iteration; the events since the last one, in order.

        An iteration that admits does nothing else, so that its `Started` goes
        out before the work that follows.
        """
        if self._last_step is None:
            self._last_step = self.clock()
        try:
            if self._serial is not None:
                self._advance_serial(*self._serial)
            elif not self._admit():
                self._advance_batch()
        except Exception as error:  # noqa: BLE001  # whatever failed, only this step's rows may pay
            self._fail(_told(error))
        events, self._events = self._events, []
        if self.idle:
            self._last_step = None
        return events

    def _admit(self) -> bool:
        """Start requests from the head of the line; whether any was started.

        1. A serial request at the head stops admission until the batch is empty,
           then it has the model to itself.
        2. A batch request starts while fewer than `width` rows run.
        """
        admitted = False
        while self._waiting:
            request = self._waiting[0]
            if request.lane is Lane.SERIAL:
                if self._running:
                    return admitted
                self._waiting.popleft()
                self._events.append(Started(request.id))
                steps = self.runner.serial(request, self.tuning.prefill_chunk)
                self._serial = (Row(request, self.clock()), steps)
                return True
            if len(self._prefilling) + len(self._decoding) >= self.tuning.width:
                return admitted
            self._start(self._waiting.popleft())
            admitted = True
        return admitted

    def _start(self, request: Submit) -> None:
        row = Row(request, self.clock())
        self._prefilling.append(row)
        row.cached = row.prefilled = self.runner.begin(row.id, request.prompt)
        self._events.append(Started(request.id, row.cached))

    def _advance_batch(self) -> None:
        if self._prefilling and self._on_the_way:
            # A prefill call can take its whole time here: tokens that are ready go first.
            self._collect(leave=0)
            return
        self._prefill()
        rows = [row for row in self._decoding if row.wants_step]
        if rows:
            self.runner.decode([row.id for row in rows])
            for row in rows:
                row.enqueued += 1
            self._on_the_way.append(rows)
        self._collect(leave=self.runner.ahead if rows and not self._prefilling else 0)

    def _prefill(self) -> None:
        """Enqueue this iteration's share of prompts and seat the rows that are through."""
        planned = self._plan_prefill()
        try:
            if planned:
                self.runner.prefill([chunk for _row, chunk in planned])
        except Exception as error:  # noqa: BLE001  # the rows that decode are not in this call
            for row, _chunk in planned:
                self._end(row, FinishReason.ERROR, _told(error))
            return
        for row, chunk in planned:
            row.prefilled += len(chunk.tokens)
            self._prefilled += len(chunk.tokens)
        for row in [row for row in self._prefilling if not row.to_prefill]:
            self._prefilling.remove(row)
            self._decoding.append(row)
            self.runner.seat(row.id, row.request)
            row.decoding_since = self.clock()

    def _plan_prefill(self) -> list[tuple[Row, Chunk]]:
        """At most one chunk per row, in order, within the budget and the pace.

        A prompt that fits in one chunk is not cut to use up what is left of them:
        whole ones can be computed together.
        """
        budget = self.tuning.prefill_budget
        seconds = self.pace.limit if self._decoding else math.inf
        planned: list[tuple[Row, Chunk]] = []
        for row in self._prefilling:
            start = row.prefilled
            size = min(row.to_prefill, self.tuning.prefill_chunk)
            if size == 0:
                continue
            fitting = self.pace.fitting(start, seconds, min(size, max(budget, 0)))
            if planned and fitting < size:
                break
            size = min(size, max(fitting, SMALLEST))
            tokens = row.request.prompt[start : start + size]
            planned.append((row, Chunk(row.id, tokens, start, last=size == row.to_prefill)))
            budget -= size
            seconds -= self.pace.cost(start, size)
        return planned

    def _collect(self, *, leave: int) -> None:
        """Read the steps on their way, all but the last `leave` of them."""
        while len(self._on_the_way) > leave:
            rows = {row.id: row for row in self._on_the_way.popleft()}
            tokens: list[Token] = []
            ended: list[tuple[Row, FinishReason]] = []
            for drawn in self.runner.collect():
                row = rows[drawn.row]
                if row not in self._decoding:
                    continue  # it ended after this step was enqueued
                if drawn.error is not None:
                    self._end(row, FinishReason.ERROR, drawn.error)
                    continue
                reason = row.take(drawn.token)
                if reason is not FinishReason.STOP:
                    tokens.append(Token(row.id, drawn.token, drawn.logprobs))
                if reason is not None:
                    ended.append((row, reason))
            self._report(Lane.BATCH, len(rows), tokens)
            for row, reason in ended:
                self._end(row, reason)

    def _advance_serial(self, row: Row, steps: SerialSteps) -> None:
        """One prefill chunk or one token of the serial request."""
        try:
            result = next(steps)
        except RowFailed as error:
            self._end_serial(FinishReason.ERROR, str(error))
            return
        if result is None:
            computed = min(row.to_prefill, self.tuning.prefill_chunk)
            row.prefilled += computed
            self._prefilled += computed
            return
        if row.decoding_since is None:
            row.decoding_since = self.clock()
        token, logprobs = result
        reason = row.take(token)
        # mlx-lm's generator computes one token beyond the one it gives.
        row.enqueued = row.generated + 1
        tokens = [] if reason is FinishReason.STOP else [Token(row.id, token, logprobs)]
        self._report(Lane.SERIAL, 1, tokens)
        if reason is not None:
            self._end_serial(reason)

    # --- ends -----------------------------------------------------------------

    def _end(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        (self._prefilling if row in self._prefilling else self._decoding).remove(row)
        self.runner.release(row.id)
        self._events.append(row.finished(reason, error, self.clock()))

    def _end_serial(self, reason: FinishReason, error: str | None = None) -> None:
        if self._serial is not None:
            row, steps = self._serial
            self._serial = None
            steps.close()  # its caches go now, not at a later collection
            self._events.append(row.finished(reason, error, self.clock()))

    def _fail(self, error: str) -> None:
        """A step failed: everything that was in it ends with an error, the line stays."""
        self._failed_steps += 1
        self._end_serial(FinishReason.ERROR, error)
        rows = [*self._prefilling, *self._decoding]
        self._prefilling.clear()
        self._decoding.clear()
        self._on_the_way.clear()
        self.runner.reset()
        self._events.extend(row.finished(FinishReason.ERROR, error, self.clock()) for row in rows)

    def _report(self, lane: Lane, rows: int, tokens: list[Token]) -> None:
        self._failed_steps = 0
        now = self.clock()
        since = now if self._last_step is None else self._last_step
        self._last_step = now
        runner = self.runner
        self._events.append(
            Step(lane, rows, now - since, tokens, runner.kv_bytes, runner.prefix_bytes)
        )


def _told(error: Exception) -> str:
    """An exception as the client and the log are told of it."""
    return f"{type(error).__name__}: {error}"
