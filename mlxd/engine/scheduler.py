"""Both lanes of one model, decided without a clock and without MLX.

The scheduler turns submissions into rows, and acts only through its `Runner`.
Its decisions depend on the messages it got and on step counts, so that a test is a
script of events.

One `step()` is one iteration: admit, enqueue prefill chunks, enqueue a decode
step, read the tokens of the step before. The order of the waiting line is
the gateway's; it is never changed here. Only where memory runs short, the rows
that came last give up their state, and are computed again from the line's head.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxd.engine import budgets
from mlxd.engine.pace import PREFILL_PER_STEP, SMALLEST, Pace, plan
from mlxd.engine.port import NO_MEMORY, Chunk, RowFailed, Runner, SerialSteps
from mlxd.engine.rows import Row
from mlxd.wire import (
    BatchTuning,
    Cancel,
    Finished,
    FinishReason,
    Lane,
    Phase,
    Preempted,
    Started,
    Step,
    Submit,
    Token,
)

Event = Started | Preempted | Step | Finished

#: Steps that fail in a row before the engine is given up.
FAILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Alone:
    """The request that has the model to itself."""

    row: Row
    steps: SerialSteps
    chunk: int  # prompt tokens of a prefill step; a retune is for those that come later

    @property
    def due(self) -> int:
        """Prompt tokens of the next step."""
        return min(self.row.to_prefill, self.chunk)


@dataclass(slots=True)
class Scheduler:
    """Owner of all rows of one engine.

    Args:
        pace: what steps and prompt tokens cost; sizes what is prefilled while rows decode.
        clock: stamps timings and decides nothing.
    """

    runner: Runner
    tuning: BatchTuning
    pace: Pace
    clock: Callable[[], float]
    _waiting: deque[Row] = field(default_factory=deque)
    _prefilling: list[Row] = field(default_factory=list)
    _decoding: list[Row] = field(default_factory=list)
    _on_the_way: deque[list[Row]] = field(default_factory=deque)
    _serial: _Alone | None = None
    _events: list[Event] = field(default_factory=list)
    _last_step: float | None = None
    _prefilled: int = 0  # prompt tokens computed, of all rows
    _failed_steps: int = 0  # in a row
    _turns: int = 0  # rows admitted so far
    # A row gave way and none has ended since: what was short is short still.
    _short: bool = False

    # --- messages -------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        """Put a request at the end of the line."""
        self._waiting.append(Row(request))

    def cancel(self, message: Cancel) -> None:
        """End a request in whatever phase it is. Unknown ids are ignored."""
        for row in self._waiting:
            if row.id == message.id:
                self._waiting.remove(row)
                self._end_waiting(row, FinishReason.CANCELLED)
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
        self.runner.retune(tuning)

    def limit(self, kv_bytes: int) -> None:
        """Rows and prefix cache may take this much from now on."""
        self._short = False
        self.runner.limit(kv_bytes)

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._waiting or self._running or self._serial or self._events)

    @property
    def phase(self) -> Phase:
        """What the next step will spend its time on, and how much that may be."""
        if self._serial is not None:
            name, due = "serial", [(self._serial.row.prefilled, self._serial.due)]
        else:
            name = "prefill" if self._prefilling else "step"
            # Not what is planned, which is found out once, but what that may be at most.
            most = max(self.tuning.prefill_budget, SMALLEST)
            left = sum(row.to_prefill for row in self._prefilling)
            due = [(max((row.prefilled for row in self._prefilling), default=0), min(left, most))]
        return Phase(name, budgets.work(self.pace, due, *self._load), self._prefilled)

    @property
    def _load(self) -> tuple[int, int]:
        """Rows that decode, at least one, and the tokens of the longest."""
        lengths = [row.length + row.enqueued - row.prefix for row in self._decoding]
        return max(1, len(lengths)), max(lengths, default=1)

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
                self._advance_serial(self._serial)
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
        2. A batch request starts while fewer than `width` rows run and its state
           fits into memory.
        3. One whose very context is being prefilled waits for its state: answers to
           one request share one prefill.
        """
        admitted = False
        while self._waiting:
            row = self._waiting[0]
            if row.request.lane is Lane.SERIAL:
                if self._running:
                    return admitted
                self._start_serial(self._waiting.popleft())
                return True
            if len(self._prefilling) + len(self._decoding) >= self.tuning.width:
                return admitted
            if self._is_on_its_way(row.context):
                return admitted
            short = self._short and self._running
            if short or not self.runner.admits(row.length, row.remaining):
                return self._wait_for_memory(row) or admitted
            self._start(self._waiting.popleft())
            admitted = True
        return admitted

    def _start_serial(self, row: Row) -> None:
        self._take_turn(row)
        self._events.append(Started(row.id))
        chunk = self.tuning.prefill_chunk
        self._serial = _Alone(row, self.runner.serial(row.request, chunk), chunk)

    def _is_on_its_way(self, context: Sequence[int]) -> bool:
        """Whether most of this context's state is still to be computed, for another row."""
        return self.runner.keeps_prefixes and any(
            row.context == context and row.to_prefill > len(context) // 2
            for row in self._prefilling
        )

    def _start(self, row: Row) -> None:
        self._prefilling.append(row)
        first = row.turn is None
        self._take_turn(row)
        row.prefilled = self.runner.begin(row.id, row.context, row.remaining)
        if first:  # preempted rows had theirs
            row.cached = row.prefilled
            self._events.append(Started(row.id, row.cached))

    def _take_turn(self, row: Row) -> None:
        if row.turn is None:
            row.turn, row.began = self._turns, self.clock()
            self._turns += 1

    def _wait_for_memory(self, row: Row) -> bool:
        """Leave a row in the line, unless nothing runs that could make room for it.

        The gateway refuses what can never fit; the budget may have shrunk since.
        """
        if self._running:
            return False
        self._waiting.popleft()
        self._end_waiting(row, FinishReason.ERROR, NO_MEMORY)
        return True

    def _advance_batch(self) -> None:
        if self._prefilling and self._on_the_way:
            # A prefill call can take its whole time here: tokens that are ready go first.
            self._collect(leave=0)
            return
        self._prefill()
        rows = self._affordable([row for row in self._decoding if row.wants_step])
        if rows:
            self.runner.decode([row.id for row in rows])
            for row in rows:
                row.enqueued += 1
            self._on_the_way.append(rows)
        self._collect(leave=self.runner.ahead if rows and not self._prefilling else 0)

    def _affordable(self, rows: list[Row]) -> list[Row]:
        """The rows that step, once those that came last have made room for the others."""
        while rows and not self.runner.can_step([row.id for row in rows]):
            running = [*self._prefilling, *self._decoding]
            if len(running) == 1:
                raise MemoryError(NO_MEMORY)
            last = max(running, key=lambda row: row.turn or 0)
            self._preempt(last)
            rows = [row for row in rows if row is not last]
        return rows

    def _preempt(self, row: Row) -> None:
        """Give up a row's state; it starts again before everything that waits."""
        (self._prefilling if row in self._prefilling else self._decoding).remove(row)
        self.runner.release(row.id)
        row.preempt()
        self._short = True
        self._waiting.appendleft(row)
        self._events.append(Preempted(row.id))

    def _planned(self) -> list[tuple[Row, Chunk]]:
        seconds = math.inf
        if self._decoding:
            seconds = PREFILL_PER_STEP[self.tuning.pacing] * self.pace.step(*self._load)
        return plan(self._prefilling, self.tuning, self.pace, seconds)

    def _prefill(self) -> None:
        """Enqueue this iteration's share of prompts and seat the rows that are through."""
        planned = self._planned()
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
            row.computed += len(chunk.tokens)
        for row in [row for row in self._prefilling if not row.to_prefill]:
            self._prefilling.remove(row)
            self._decoding.append(row)
            try:
                self.runner.seat(row.id, row.request, row.given[: row.prefix])
            except Exception as error:  # noqa: BLE001  # the others have their seats
                self._end(row, FinishReason.ERROR, _told(error))
                continue
            if row.decoding_since is None:
                row.decoding_since = self.clock()

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
                    self._end(row, FinishReason.FORMAT, drawn.error)
                    continue
                reason = row.take(drawn.token)
                if reason is not FinishReason.STOP:
                    tokens.append(Token(row.id, drawn.token, drawn.logprobs))
                if reason is not None:
                    ended.append((row, reason))
            self._report(Lane.BATCH, len(rows), tokens)
            for row, reason in ended:
                self._end(row, reason)

    def _advance_serial(self, alone: _Alone) -> None:
        """One prefill chunk or one token of the serial request."""
        row = alone.row
        try:
            result = next(alone.steps)
        except RowFailed as error:
            self._end_serial(error.reason, str(error))
            return
        if result is None:
            size = alone.due
            row.prefilled += size
            row.computed += size
            self._prefilled += size
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
        self._short = False
        self._events.append(row.finished(reason, error, self.clock()))

    def _end_waiting(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        now = self.clock()
        if row.turn is None:
            row.began = now
        else:  # it was preempted
            self._short = False
        self._events.append(row.finished(reason, error, now))

    def _end_serial(self, reason: FinishReason, error: str | None = None) -> None:
        if self._serial is not None:
            alone, self._serial = self._serial, None
            alone.steps.close()  # its caches go now, not at a later collection
            self._events.append(alone.row.finished(reason, error, self.clock()))

    def _fail(self, error: str) -> None:
        """A step failed: everything that was in it ends with an error, the line stays."""
        self._failed_steps += 1
        self._end_serial(FinishReason.ERROR, error)
        rows = [*self._prefilling, *self._decoding]
        self._prefilling.clear()
        self._decoding.clear()
        self._on_the_way.clear()
        self._short = False
        self.runner.reset()
        self._events.extend(row.finished(FinishReason.ERROR, error, self.clock()) for row in rows)

    def _report(self, lane: Lane, rows: int, tokens: list[Token]) -> None:
        self._failed_steps = 0
        now = self.clock()
        since = now if self._last_step is None else self._last_step
        self._last_step = now
        runner = self.runner
        bytes_now = (runner.kv_bytes, runner.prefix_bytes, runner.peak_bytes)
        self._events.append(Step(lane, rows, now - since, tokens, *bytes_now))


def _told(error: Exception) -> str:
    """An exception as the client and the log are told of it."""
    return f"{type(error).__name__}: {error}"
