"""The scheduler decides without a clock and without a model: its tests are scripts of events."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.engine.budgets import SLACK, WORK_FLOOR, work
from mlxd.engine.pace import PREFILL_PER_STEP, SMALLEST, Pace, StepCost
from mlxd.engine.port import Chunk, Drawn, SerialSteps
from mlxd.engine.scheduler import FAILED_STEPS, Scheduler
from mlxd.wire import (
    BatchTuning,
    Cancel,
    Finished,
    FinishReason,
    Lane,
    Pacing,
    Preempted,
    Sampling,
    Started,
    Step,
    Submit,
)

EOS = 0
FREE = Pace(steps=(), call=0.0, token=0.0, pair=0.0)


def paced(limit: float, token: float, pair: float = 0.0, call: float = 0.0) -> Pace:
    """A pace by which so many seconds of prefill go with every step, in balance."""
    step = limit / PREFILL_PER_STEP[Pacing.BALANCED]
    return Pace([StepCost(1, step, 0.0)], call, token, pair)


class RuleBroken(BaseException):
    """The scheduler broke a rule of the port; not an Exception, so that no step handler eats it."""


def hold(rule: bool) -> None:
    """Fail the test where a rule of the port is broken."""
    if not rule:
        raise RuleBroken


def pages(tokens: int) -> int:
    """Memory that the state of so many tokens takes."""
    return -(-tokens // 8)


class FakeRunner:
    """Records what it is asked to do; row r's tokens are scripted, or count up from 1.

    It holds the scheduler to the port's rules: a row is prefilled in order, seated
    when complete, decoded while seated, and the lanes never overlap.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.ahead = 1
        self.log: list[tuple[str, list[int]]] = []
        self.script: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}  # prompt tokens in the prefix cache, by row
        self.keeps_prefixes = False
        self.prefilled: dict[int, int] = {}
        self.seated: set[int] = set()
        self.given: dict[int, int] = {}
        self.enqueued: deque[list[tuple[int, int]]] = deque()
        self.serial_running = 0
        self.failing: tuple[str, Exception] | None = None  # in which call, and how
        self.memory: float = math.inf  # in pages of 8 tokens of state, over all rows
        self.most_memory = 0
        self.sizes: dict[int, int] = {}  # tokens of state that each row has, or was admitted with

    def retune(self, tuning: BatchTuning) -> None:
        self.width = max(tuning.width, len(self.prefilled))  # rows that have begun stay

    def clear_cache(self) -> None:
        self.known.clear()

    def admits(self, tokens: int, remaining: int) -> bool:
        hold(remaining > 0)
        return self._pages() + pages(tokens + 1) <= self.memory

    def can_step(self, rows: Sequence[int]) -> bool:
        hold(set(rows) <= self.seated)
        return self._pages(rows) <= self.memory

    def begin(self, row: int, tokens: Sequence[int], remaining: int) -> int:
        self.sizes[row] = len(tokens)
        self._note_memory()
        known = self.prefilled[row] = min(self.known.get(row, 0), len(tokens) - 1)
        return known

    def _note_memory(self) -> None:
        self.most_memory = max(self.most_memory, self._pages())

    def _pages(self, stepping: Sequence[int] = ()) -> int:
        return sum(pages(size + (row in stepping)) for row, size in self.sizes.items())

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        hold(not self.serial_running)
        self._maybe_fail("prefill")
        self.log.append(("prefill", [chunk.row for chunk in chunks]))
        for chunk in chunks:
            hold(chunk.start == self.prefilled.get(chunk.row, 0))
            self.prefilled[chunk.row] = chunk.start + len(chunk.tokens)

    def seat(self, row: int, request: Submit, given: Sequence[int]) -> None:
        self._maybe_fail("seat")
        hold(self.prefilled.get(row, 0) == len(request.prompt) + len(given) - 1)
        hold(row not in self.seated)
        hold(list(given) == [self._scripted(row, place) for place in range(1, len(given) + 1)])
        self.given[row] = len(given)
        self.seated.add(row)
        hold(len(self.seated) <= self.width)

    def decode(self, rows: Sequence[int]) -> None:
        hold(not self.serial_running)
        self._maybe_fail("decode")
        hold(set(rows) <= self.seated)
        self.log.append(("decode", list(rows)))
        for row in rows:
            self.sizes[row] += 1
        self._note_memory()
        self.enqueued.append([(row, self._token(row)) for row in rows])

    def collect(self) -> list[Drawn]:
        self._maybe_fail("collect")
        return [Drawn(row, token) for row, token in self.enqueued.popleft()]

    def release(self, row: int) -> None:
        self.prefilled.pop(row, None)
        self.sizes.pop(row, None)
        self.seated.discard(row)

    def serial(self, request: Submit, chunk: int) -> SerialSteps:
        hold(not self.seated)
        hold(not self.enqueued)
        self.serial_running += 1
        try:
            for _ in range(0, len(request.prompt) - 1, chunk):
                yield None
            for _ in range(request.max_tokens):
                self.log.append(("serial", [request.id]))
                self._maybe_fail("serial")
                yield self._token(request.id), None
        finally:
            self.serial_running -= 1

    def reset(self) -> None:
        self.prefilled.clear()
        self.sizes.clear()
        self.seated.clear()
        self.enqueued.clear()

    @property
    def kv_bytes(self) -> int:
        return 100 * len(self.seated)

    @property
    def prefix_bytes(self) -> int:
        return 0

    @property
    def peak_bytes(self) -> int:
        return 0

    def limit(self, kv_bytes: int) -> None:
        self.memory = kv_bytes

    def _token(self, row: int) -> int:
        place = self.given[row] = self.given.get(row, 0) + 1
        return self._scripted(row, place)

    def _scripted(self, row: int, place: int) -> int:
        script = self.script.get(row)
        return script[place - 1] if script and place <= len(script) else place

    def _maybe_fail(self, call: str) -> None:
        if self.failing is not None and self.failing[0] == call:
            error, self.failing = self.failing[1], None
            raise error


class Bench:
    """A scheduler over the fake, with the events it gave."""

    def __init__(
        self, width: int = 2, chunk: int = 16, budget: int = 32, pace: Pace = FREE
    ) -> None:
        self.runner = FakeRunner(width)
        ticks = itertools.count().__next__
        self.scheduler = Scheduler(
            self.runner, BatchTuning(width, chunk, budget), pace, lambda: float(ticks())
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.started: list[int] = []
        self.cached: dict[int, int] = {}
        self.preempted: list[int] = []

    def submit(
        self, number: int, *, prompt: int = 4, count: int = 3, lane: Lane = Lane.BATCH
    ) -> None:
        self.tokens[number] = []
        sampling = Sampling(seed=number)
        self.scheduler.submit(Submit(number, lane, [1] * prompt, count, [EOS], sampling))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for event in self.scheduler.step():
                match event:
                    case Started(row, cached):
                        self.started.append(row)
                        self.cached[row] = cached
                    case Preempted(row):
                        self.preempted.append(row)
                    case Step():
                        for token in event.tokens:
                            self.tokens[token.id].append(token.token)
                    case Finished():
                        assert event.id not in self.finished
                        self.finished[event.id] = event

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        pytest.fail("the scheduler did not come to rest")


def test_an_end_of_sequence_token_ends_the_row_with_stop_and_is_counted_but_not_emitted() -> None:
    """SPEC 1: it counts as generated."""
    bench = Bench()
    bench.runner.script[1] = [5, 6, EOS, 9]
    bench.submit(1, count=10)
    bench.drain()
    assert bench.tokens[1] == [5, 6]
    result = bench.finished[1]
    assert result.reason is FinishReason.STOP
    assert result.generated_tokens == 3
    assert result.discarded_tokens == 1  # one step was on its way


def test_end_of_sequence_at_the_limit_is_stop_and_not_length() -> None:
    """At one token the order is end of sequence, then length."""
    bench = Bench()
    bench.runner.script[1] = [5, EOS]
    bench.submit(1, count=2)
    bench.drain()
    assert bench.finished[1].reason is FinishReason.STOP


def test_reaching_the_limit_ends_with_length_and_computes_nothing_in_vain() -> None:
    """The host knows the limit, so no step is enqueued past it."""
    bench = Bench()
    bench.submit(1, count=3)
    bench.drain()
    assert bench.tokens[1] == [1, 2, 3]
    assert bench.finished[1].reason is FinishReason.LENGTH
    assert bench.finished[1].discarded_tokens == 0


def test_rows_join_between_two_steps_of_others() -> None:
    """Continuous batching: a request that arrives later decodes together with the first."""
    bench = Bench()
    bench.submit(1, count=20)
    bench.step(6)
    bench.submit(2, count=3)
    bench.drain()
    assert ("decode", [1, 2]) in bench.runner.log


def test_at_most_width_rows_run_and_the_rest_wait_in_arrival_order() -> None:
    """The fake refuses a row beyond its width."""
    bench = Bench(width=2)
    for number in range(6):
        bench.submit(number, count=2 + number % 3)
    bench.drain()
    assert bench.started == [0, 1, 2, 3, 4, 5]
    assert len(bench.finished) == 6


def test_a_serial_request_stops_admission_until_the_batch_is_empty() -> None:
    """Running rows finish, it runs alone, then admission resumes in order."""
    bench = Bench(width=4)
    bench.submit(1, count=5)
    bench.step(2)
    bench.submit(2, lane=Lane.SERIAL, count=3)
    bench.submit(3, count=2)
    bench.drain()
    kinds = [(kind, rows) for kind, rows in bench.runner.log if kind != "prefill"]
    first_serial = kinds.index(("serial", [2]))
    assert all(rows == [1] for _kind, rows in kinds[:first_serial])
    assert kinds[first_serial : first_serial + 3] == [("serial", [2])] * 3
    assert bench.started == [1, 2, 3]


def test_neither_lane_starves_the_other_under_a_sustained_load_of_both() -> None:
    """Both lanes share one waiting order, so each request ends in its turn."""
    bench = Bench(width=2)
    for number in range(20):
        bench.submit(number, lane=Lane.SERIAL if number % 3 == 0 else Lane.BATCH)
    bench.drain()
    assert bench.started == list(range(20))


def test_a_long_prompt_advances_by_one_chunk_an_iteration_while_rows_decode() -> None:
    """Running rows get a token between any two chunks."""
    bench = Bench(width=2, chunk=16, budget=32)
    bench.submit(1, count=40)
    bench.step(3)
    bench.submit(2, prompt=100, count=2)
    bench.drain()
    order = [kind for kind, _rows in bench.runner.log]
    pairs = list(itertools.pairwise(order[order.index("decode") :]))
    assert ("prefill", "prefill") not in pairs


def test_short_prompts_share_one_prefill_within_the_budget() -> None:
    """Whole prompts are taken together until the budget is used up, and none is cut for it."""
    bench = Bench(width=4, chunk=16, budget=32)
    for number in range(4):
        bench.submit(number, prompt=13)
    bench.step(2)
    assert bench.runner.log[0] == ("prefill", [0, 1])


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    """Its only token is fed to its first decode step."""
    bench = Bench()
    bench.submit(1, prompt=1)
    bench.drain()
    assert "prefill" not in [kind for kind, _rows in bench.runner.log]
    assert bench.tokens[1] == [1, 2, 3]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("lane", list(Lane))
def test_a_cancel_is_answered_once_and_frees_the_row_in_every_phase(steps: int, lane: Lane) -> None:
    """Waiting, prefilling, decoding or serial: the next request runs, nothing is left."""
    bench = Bench(width=1, chunk=16, budget=16)
    bench.submit(1, prompt=40, count=50, lane=lane)
    bench.submit(2, count=2)
    bench.step(steps)
    bench.scheduler.cancel(Cancel(1))
    bench.drain()
    assert bench.finished[1].reason is FinishReason.CANCELLED
    assert bench.finished[2].reason is FinishReason.LENGTH
    assert not bench.runner.seated
    assert not bench.runner.serial_running


def test_a_cancelled_row_is_gone_at_the_next_step() -> None:
    """Its token on the way is dropped and counted as discarded."""
    bench = Bench()
    bench.submit(1, count=50)
    bench.step(6)
    seen = len(bench.tokens[1])
    bench.scheduler.cancel(Cancel(1))
    bench.drain()
    assert len(bench.tokens[1]) == seen
    result = bench.finished[1]
    assert result.generated_tokens == seen
    assert result.discarded_tokens == 1


def test_tokens_that_are_ready_are_told_before_a_prefill_call() -> None:
    """Such a call can take its whole time; a running stream must not wait for it twice."""
    bench = Bench(width=2, chunk=16, budget=16)
    bench.submit(1, count=40)
    bench.step(4)
    bench.submit(2, prompt=100)
    calls = len(bench.runner.log)
    seen = len(bench.tokens[1])
    bench.step(2)
    assert len(bench.runner.log) == calls
    assert len(bench.tokens[1]) == seen + 1
    bench.step()
    assert bench.runner.log[calls:] == [("prefill", [2]), ("decode", [1])]
    assert len(bench.tokens[1]) == seen + 2


def test_without_steps_ahead_each_step_is_read_at_once_and_none_is_in_vain() -> None:
    """Where enqueuing waits anyway, a row that ends has no step on its way."""
    bench = Bench()
    bench.runner.ahead = 0
    bench.runner.script[1] = [5, EOS]
    bench.submit(1, count=9)
    bench.drain()
    assert bench.tokens[1] == [5]
    assert bench.finished[1].discarded_tokens == 0


def test_cancelling_an_unknown_or_finished_request_does_nothing() -> None:
    """A cancel can cross the row's own end on the wire."""
    bench = Bench()
    bench.submit(1)
    bench.drain()
    bench.scheduler.cancel(Cancel(1))
    bench.scheduler.cancel(Cancel(99))
    assert bench.scheduler.idle


@pytest.mark.parametrize("call", ["decode", "collect"])
def test_a_failed_step_fails_the_rows_in_it_and_the_line_goes_on(call: str) -> None:
    """Two that run get an error, the third that waits is served."""
    bench = Bench(width=2)
    for number in (1, 2, 3):
        bench.submit(number, count=6)
    bench.step(4)
    bench.runner.failing = (call, RuntimeError("out of memory"))
    bench.drain()
    for number in (1, 2):
        assert bench.finished[number].reason is FinishReason.ERROR
        assert bench.finished[number].error == "RuntimeError: out of memory"
    assert bench.finished[3].reason is FinishReason.LENGTH


def test_an_engine_whose_every_step_fails_is_broken() -> None:
    """It has not got into something that another try would get it out of; one success does."""
    bench = Bench()
    for number in range(FAILED_STEPS):
        assert not bench.scheduler.broken
        bench.submit(number)
        bench.runner.failing = ("decode", RuntimeError("device lost"))
        bench.drain()
    assert bench.scheduler.broken

    bench.submit(99)
    bench.drain()
    assert not bench.scheduler.broken


def test_a_phase_says_what_it_may_take_and_what_was_done() -> None:
    """Budgets grow with the prompt tokens that are next, and their count tells progress."""
    bench = Bench(pace=Pace([StepCost(1, 2.0, 0.0)], call=0.0, token=0.5, pair=0.0))
    bench.submit(1, prompt=42)
    bench.scheduler.step()
    before = bench.scheduler.phase
    bench.scheduler.step()
    after = bench.scheduler.phase

    assert before.name == "prefill"
    tokens = after.done - before.done
    assert tokens > 0
    assert before.budget is not None
    assert before.budget >= WORK_FLOOR + SLACK * (0.5 * tokens + 2.0)


def test_an_unmeasured_machine_gets_a_second_for_a_prompt_token() -> None:
    """A chunk of 2,000 tokens on a slow BLAS is not taken for a hang."""
    assert work(FREE, [(0, 2000)]) >= 2000


def test_a_failed_prefill_fails_its_own_rows_and_no_row_that_decodes() -> None:
    """A failure belongs to the smallest thing that caused it."""
    bench = Bench(width=3)
    bench.submit(1, count=9)
    bench.step(4)
    bench.submit(2, prompt=9)
    bench.runner.failing = ("prefill", RuntimeError("too large"))
    bench.drain()
    assert bench.finished[1].reason is FinishReason.LENGTH
    assert bench.finished[2].reason is FinishReason.ERROR
    assert bench.finished[2].error == "RuntimeError: too large"


def test_a_row_whose_seating_fails_ends_with_an_error() -> None:
    """It is neither prefilling nor decoding then, and must not be lost."""
    bench = Bench()
    bench.submit(1)
    bench.runner.failing = ("seat", MemoryError("no room"))
    bench.drain()
    assert bench.finished[1].reason is FinishReason.ERROR


def test_what_the_prefix_cache_holds_is_told_and_not_computed_again() -> None:
    """The first chunk starts behind it; the account leaves it out."""
    bench = Bench()
    bench.runner.known[1] = 12
    bench.submit(1, prompt=20)
    bench.drain()
    assert bench.cached[1] == 12
    result = bench.finished[1]
    assert (result.prompt_tokens, result.cached_tokens, result.prefilled_tokens) == (20, 12, 8)


def test_rows_of_one_prompt_share_its_prefill() -> None:
    """Those behind the first wait for its state, and then start together."""
    bench = Bench(width=4, chunk=16)
    bench.runner.keeps_prefixes = True
    bench.runner.known = {2: 40, 3: 40}
    for number in (1, 2, 3):
        bench.submit(number, prompt=40, count=9)
    bench.submit(4, prompt=4, count=9)
    bench.step()
    assert bench.started == [1]
    bench.step(5)
    assert bench.started == [1, 2, 3, 4]
    assert (bench.cached[2], bench.cached[3]) == (39, 39)


def test_rows_of_one_prompt_do_not_wait_where_nothing_is_kept() -> None:
    """They would wait for nothing."""
    bench = Bench(width=4, chunk=16)
    for number in (1, 2, 3):
        bench.submit(number, prompt=40, count=9)
    bench.step()
    assert bench.started == [1, 2, 3]


def test_a_cancelled_prompt_counts_only_what_was_computed_of_it() -> None:
    """One chunk of a long prompt, no more."""
    bench = Bench(chunk=16, budget=16)
    bench.submit(1, prompt=400)
    bench.step(2)
    bench.scheduler.cancel(Cancel(1))
    bench.drain()
    assert bench.finished[1].prefilled_tokens == 16


def test_started_is_told_before_the_work_that_follows() -> None:
    """An iteration that admits computes nothing."""
    bench = Bench()
    bench.submit(1)
    bench.step()
    assert bench.started == [1]
    assert not bench.runner.log


def test_while_rows_decode_prefill_keeps_to_the_measured_pace() -> None:
    """Alone a prompt gets the whole budget; beside running rows it gets less."""
    bench = Bench(width=2, chunk=64, budget=128, pace=paced(1.0, 1 / 32))
    bench.submit(1, prompt=61, count=30)
    bench.step(2)
    assert bench.runner.log[0] == ("prefill", [1])
    assert bench.runner.prefilled[1] == 60
    bench.submit(2, prompt=100)
    bench.step(3)
    assert bench.runner.prefilled[2] == 32


def test_the_pace_slows_down_as_a_prompt_grows_and_never_stops() -> None:
    """Attention makes each token dearer; a smallest piece always goes."""
    pace = paced(1.0, 1 / 128, 1 / 4096)
    bench = Bench(width=2, chunk=64, budget=128, pace=pace)
    bench.submit(1, count=400)
    bench.step(3)
    bench.submit(2, prompt=600)
    sizes = []
    while 2 not in bench.finished:
        before = bench.runner.prefilled.get(2, 0)
        bench.step()
        if bench.runner.prefilled.get(2, 0) > before:
            sizes.append(bench.runner.prefilled[2] - before)
    assert sizes[0] == 64
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-2] == SMALLEST


def test_a_piece_is_sized_by_the_step_of_the_rows_that_decode() -> None:
    """A wider step takes longer, and so does one of longer rows: more prefill goes with it."""
    per_step = PREFILL_PER_STEP[Pacing.BALANCED]
    steps = [StepCost(1, 1.0, 0.0), StepCost(2, 2.0, 0.0), StepCost(4, 2.0, 0.5)]
    pace = Pace(steps, call=0.0, token=per_step / 16, pair=0.0)
    assert [pace.step(rows, 4) for rows in (1, 2, 3, 4, 9)] == [1, 2, 4, 4, 4]
    for rows, expected in ((1, 16), (2, 32)):
        bench = Bench(width=3, chunk=64, budget=64, pace=pace)
        for number in range(rows):
            bench.submit(number, count=60)
        bench.step(6)
        bench.submit(9, prompt=90)
        bench.step(3)
        assert bench.runner.prefilled[9] == expected


@pytest.mark.parametrize(
    ("pacing", "expected"), [("latency", 16), ("balanced", 32), ("throughput", 60)]
)
def test_pacing_moves_the_trade_between_rows_that_decode_and_prompts(
    pacing: str, expected: int
) -> None:
    """By a retune, at the next iteration; the budget of tokens holds always."""
    pace = Pace([StepCost(1, 1.0, 0.0)], call=0.0, token=1 / 16, pair=0.0)
    bench = Bench(width=2, chunk=64, budget=60, pace=pace)
    bench.submit(1, count=60)
    bench.step(4)
    bench.scheduler.retune(BatchTuning(2, 64, 60, pacing=Pacing(pacing)))
    bench.submit(2, prompt=90)
    bench.step(3)
    assert bench.runner.prefilled[2] == expected


def test_what_a_call_costs_however_short_is_reckoned_with() -> None:
    """Else short pieces would take longer than they may."""
    pace = paced(1.0, token=1 / 64, call=0.5)
    assert pace.fitting(0, 1.0, 64) == 32
    assert pace.fitting(0, 1.0, 16) == 16
    assert pace.fitting(0, 0.4, 16) == 0
    assert pace.fitting(0, 0.4, 0) == 0


def test_an_iteration_plans_its_prefill_once() -> None:
    """What the phase says of it before is a bound, not another plan."""

    class Prompt(list[int]):
        cuts = 0

        def __getitem__(self, index: Any) -> Any:
            self.cuts += 1
            return super().__getitem__(index)

    bench = Bench()
    prompt = Prompt([1] * 60)
    bench.scheduler.submit(Submit(1, Lane.BATCH, prompt, 3, [EOS], Sampling(seed=1)))
    bench.step()
    for iterations in (1, 2, 3):
        assert bench.scheduler.phase.name == "prefill"
        bench.step()
        assert prompt.cuts == iterations


def test_a_serial_request_is_accounted_by_the_chunk_that_it_began_with() -> None:
    """A retune is for the requests behind it."""
    bench = Bench(chunk=16, budget=16)
    bench.submit(1, prompt=65, lane=Lane.SERIAL, count=2)
    bench.step(2)
    bench.scheduler.retune(BatchTuning(2, 64, 64))
    bench.step()
    assert bench.scheduler.phase.done == 32
    bench.scheduler.cancel(Cancel(1))
    bench.drain()
    assert bench.finished[1].prefilled_tokens == 32


def test_the_serial_lane_counts_the_token_that_its_generator_computed_ahead() -> None:
    """mlx-lm's generator has always one more on its way."""
    bench = Bench()
    bench.submit(1, lane=Lane.SERIAL, count=3)
    bench.drain()
    assert bench.finished[1].generated_tokens == 3
    assert bench.finished[1].discarded_tokens == 1


def test_a_failure_in_the_serial_lane_fails_that_request_alone() -> None:
    """The next in line is served."""
    bench = Bench()
    bench.submit(1, lane=Lane.SERIAL, count=5)
    bench.submit(2)
    bench.step(2)
    bench.runner.failing = ("serial", ValueError("no"))
    bench.drain()
    assert bench.finished[1].reason is FinishReason.ERROR
    assert bench.finished[2].reason is FinishReason.LENGTH


def test_a_smaller_width_lets_running_rows_finish_and_holds_new_ones() -> None:
    """A retune drops nothing; a wider one admits at once."""
    bench = Bench(width=3)
    for number in range(3):
        bench.submit(number, count=10)
    bench.step(3)
    bench.scheduler.retune(BatchTuning(1, 16, 32))
    bench.submit(3, count=2)
    bench.drain()
    together = [rows for kind, rows in bench.runner.log if kind == "decode" and 3 in rows]
    assert together == [[3], [3]]
    assert all(f.reason is FinishReason.LENGTH for f in bench.finished.values())


def test_the_row_that_came_last_gives_way_when_memory_runs_short() -> None:
    """Older rows go on; it starts again when there is room, and its text is what it would be."""
    bench = Bench(width=2)
    bench.runner.memory = 4
    bench.submit(1, prompt=4, count=18)
    bench.submit(2, prompt=4, count=18)
    bench.drain()
    assert bench.preempted == [2]
    assert bench.started == [1, 2]
    assert bench.tokens[1] == bench.tokens[2] == list(range(1, 19))
    assert bench.finished[2].reason is FinishReason.LENGTH
    assert bench.finished[2].generated_tokens == 18
    assert bench.finished[2].prefilled_tokens > 4  # it was computed twice
    assert bench.runner.most_memory <= 4


def test_several_rows_that_gave_way_come_back_in_their_order() -> None:
    """The line's head is theirs, oldest first, before requests that were never started."""
    bench = Bench(width=3)
    bench.runner.memory = 4
    for number in (1, 2, 3, 4):
        bench.submit(number, prompt=6, count=20)
    bench.drain()
    assert bench.preempted[:2] == [3, 2]
    assert bench.started == [1, 2, 3, 4]
    assert list(bench.finished) == [1, 2, 3, 4]
    assert all(bench.tokens[number] == list(range(1, 21)) for number in bench.tokens)
    assert bench.runner.most_memory <= 4


def test_what_does_not_fit_beside_the_others_waits_and_so_does_what_stands_behind_it() -> None:
    """Memory is no reason to let a smaller request overtake."""
    bench = Bench(width=4)
    bench.runner.memory = 3
    bench.submit(1, prompt=4, count=6)
    bench.submit(2, prompt=16, count=2)
    bench.submit(3, prompt=2, count=2)
    bench.step(4)
    assert bench.started == [1]
    bench.drain()
    assert bench.started == [1, 2, 3]


def test_a_row_that_gave_way_can_be_cancelled_where_it_waits() -> None:
    """Its account has what it was given."""
    bench = Bench(width=2)
    bench.runner.memory = 2
    bench.submit(1, prompt=4, count=30)
    bench.submit(2, prompt=4, count=30)
    while not bench.preempted:
        bench.step()
    bench.scheduler.cancel(Cancel(2))
    bench.step()
    result = bench.finished[2]
    assert result.reason is FinishReason.CANCELLED
    assert result.generated_tokens == len(bench.tokens[2]) > 0


def test_a_lone_row_that_outgrows_all_memory_ends_with_an_error() -> None:
    """Nothing can make room for it; the engine lives on."""
    bench = Bench()
    bench.runner.memory = 1
    bench.submit(1, prompt=4, count=30)
    bench.drain()
    assert bench.finished[1].reason is FinishReason.ERROR
    assert "memory" in (bench.finished[1].error or "")
    bench.submit(2, prompt=9, count=1)  # and one that could never start
    bench.submit(3, prompt=2, count=1)
    bench.drain()
    assert bench.finished[2].reason is FinishReason.ERROR
    assert bench.finished[3].reason is FinishReason.LENGTH


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.sampled_from(list(Lane)),
            st.integers(1, 60),
            st.integers(1, 8),
            st.lists(st.integers(0, 3), max_size=8),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(
            st.just("fail"), st.sampled_from(["prefill", "seat", "decode", "collect", "serial"])
        ),
        st.tuples(st.just("retune"), st.integers(1, 4)),
        st.tuples(st.just("memory"), st.integers(1, 12)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_any_interleaving_ends_every_request_once_and_leaks_nothing(
    actions: list[tuple[Any, ...]],
) -> None:
    """Submits, cancels, finishes, failures and retunes in any order; the fake holds the rules."""
    bench = Bench(width=2, chunk=16, budget=24)
    submitted = 0
    for action in actions:
        match action:
            case ("submit", lane, prompt, count, script):
                bench.runner.script[submitted] = script
                bench.submit(submitted, prompt=prompt, count=count, lane=lane)
                submitted += 1
            case ("cancel", number):
                bench.scheduler.cancel(Cancel(number))
            case ("step", times):
                bench.step(times)
            case ("fail", call):
                bench.runner.failing = (call, RuntimeError("injected"))
            case ("retune", width):
                bench.scheduler.retune(BatchTuning(width, 16, 24))
            case ("memory", limit):
                bench.runner.memory = limit
    bench.runner.memory = math.inf  # what waits for memory would wait for good
    bench.drain()
    assert sorted(bench.finished) == list(range(submitted))
    assert bench.started == sorted(bench.started)
    assert not bench.runner.seated
    assert not bench.runner.prefilled
    assert not bench.runner.serial_running
    for number, result in bench.finished.items():
        emitted = len(bench.tokens[number])
        assert result.generated_tokens == emitted + (result.reason is FinishReason.STOP)
