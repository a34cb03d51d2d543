"""Admission, order, lanes and the one end of every request, against a hand-driven engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec import structs

from mlxd.config import BatchSettings, PolicySettings
from mlxd.errors import BadRequest, Draining, EngineFailed, ModelNotReady, QueueFull, TimedOut
from mlxd.gateway import Gateway, ProtocolError
from mlxd.gateway.gateway import LOOKAHEAD
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.operations import LiveRequests
from mlxd.serving import ANYBODY, Caller, Outcome
from mlxd.wire import (
    BatchTuning,
    Capabilities,
    FinishReason,
    Lane,
    Pacing,
    Retune,
    Started,
    Submit,
)
from tests.daemon.fakes import EVERYTHING, MODEL, Bench, generation, read, terms

SEED_SERIAL = PolicySettings(seed="serial")


@pytest.fixture
async def admitted():
    """Enters tickets that leave together at the test's end."""
    async with AsyncExitStack() as stack:

        async def admit(
            bench: Bench, *names: str, traits: tuple[str, ...] = (), caller: Caller = ANYBODY
        ):
            return [
                await stack.enter_async_context(
                    bench.gateway.admit(generation(name, traits=traits, caller=caller))
                )
                for name in names
            ]

        yield admit


class TestOrder:
    async def test_engine_gets_free_rows_plus_a_lookahead_in_arrival_order(self, admitted):
        """The engine holds at most its free rows and two more, first come first."""
        bench = Bench(terms(width=2))

        await admitted(bench, *"abcdef")

        assert bench.submitted() == [0, 1, 2, 3]
        assert bench.gateway.waiting(Lane.BATCH) == 6

    async def test_callers_take_turns_by_weight(self, admitted):
        """A key that floods waits beside one that asks now and then, not before it."""
        bench = Bench(terms(width=1, queue=20))
        first = await admitted(bench, *"abc")  # what the engine has is out of the line's hands
        await admitted(bench, *"defgh", caller=Caller("flood"))
        await admitted(bench, *"ij", caller=Caller("rare", weight=2.0))

        bench.start(first[0])
        for ticket in first:
            bench.finish(ticket)

        # d and i are level, then "rare" has had half a turn only.
        assert bench.submitted() == [0, 1, 2, 3, 8, 9]

    async def test_a_start_hands_nothing_more_and_an_end_hands_one(self, admitted):
        """A row that fills frees no room; a row that ends does."""
        bench = Bench(terms(width=2))
        tickets = await admitted(bench, *"abcdef")

        bench.start(tickets[0])
        assert bench.submitted() == [0, 1, 2, 3]
        bench.finish(tickets[0])

        assert bench.submitted() == [0, 1, 2, 3, 4]

    async def test_both_lanes_share_one_order(self, admitted):
        """A serial request is handed over where it stands, neither earlier nor later."""
        bench = Bench(terms(SEED_SERIAL, width=4))

        await admitted(bench, "a")
        await admitted(bench, "b", traits=("seed",))
        await admitted(bench, "c")

        lanes = [frame.lane for frame in bench.sent if isinstance(frame, Submit)]
        assert lanes == [Lane.BATCH, Lane.SERIAL, Lane.BATCH]

    async def test_submission_carries_the_whole_request(self, admitted):
        """The engine gets prompt, limit, end tokens and sampling as they were asked."""
        bench = Bench(terms())
        await admitted(bench, "a")
        asked = generation("a")

        assert bench.sent == [
            Submit(0, Lane.BATCH, list(asked.prompt), 100, [0], asked.sampling),
        ]

    async def test_retune_widens_at_once_and_touches_nothing_that_runs(self, admitted):
        """More width tells the engine and lets more of the line through."""
        bench = Bench(terms(width=1))
        tickets = await admitted(bench, *"abcdef")
        bench.start(tickets[0])

        bench.gateway.retune(terms(width=4))

        batch = BatchSettings(width=4)
        tuning = BatchTuning(4, batch.prefill_chunk, batch.prefill_budget, batch.prefix_cache)
        assert [f for f in bench.sent if isinstance(f, Retune)] == [Retune(tuning)]
        assert bench.submitted() == [0, 1, 2, 3, 4, 5]
        assert bench.cancelled() == []

    async def test_policy_change_is_no_news_for_the_engine(self, admitted):
        """Only batch settings are the engine's; the next request meets the new policy."""
        bench = Bench(terms())
        bench.gateway.retune(terms(SEED_SERIAL))

        (ticket,) = await admitted(bench, "a", traits=("seed",))

        assert not [f for f in bench.sent if isinstance(f, Retune)]
        assert (ticket.lane, ticket.reason) == (Lane.SERIAL, "seed")


class TestLanes:
    async def test_plain_request_takes_the_batch(self, admitted):
        """No trait, no reason."""
        bench = Bench(terms())
        (ticket,) = await admitted(bench, "a")

        assert (ticket.lane, ticket.reason) == (Lane.BATCH, "none")
        assert bench.value("mlxd_lane_decisions_total", lane="batch", reason="none") == 1

    async def test_unbatchable_cache_goes_serial(self, admitted):
        """A model that the engine cannot batch runs serially, and says why."""
        alone = Capabilities(256, 1024, ["ArraysCache"], "cache", EVERYTHING.batchable)
        bench = Bench(terms(), alone)
        (ticket,) = await admitted(bench, "a")

        assert (ticket.lane, ticket.reason) == (Lane.SERIAL, "cache")
        assert bench.value("mlxd_lane_decisions_total", lane="serial", reason="cache") == 1

    @pytest.mark.parametrize(
        ("answer", "lane", "reason"),
        [("batch", Lane.BATCH, "none"), ("serial", Lane.SERIAL, "kv_quant")],
    )
    async def test_quantised_kv_is_a_trait_of_every_request(self, admitted, answer, lane, reason):
        """The policy says where a model with it runs."""
        quantised = structs.replace(EVERYTHING, kv_bits=8)
        bench = Bench(terms(PolicySettings(kv_quant=answer)), quantised)
        (ticket,) = await admitted(bench, "a")

        assert (ticket.lane, ticket.reason) == (lane, reason)

    async def test_width_comes_before_the_cache(self, admitted):
        """With one row and a cache that cannot be batched, the reason is the width."""
        alone = Capabilities(256, 1024, ["ArraysCache"], "cache", EVERYTHING.batchable)
        bench = Bench(terms(width=1), alone)
        (ticket,) = await admitted(bench, "a")

        assert (ticket.lane, ticket.reason) == (Lane.SERIAL, "width")

    async def test_rejected_trait_is_named(self):
        """`reject` in the policy is 400 with its own code and the trait; nothing is taken."""
        bench = Bench(terms(PolicySettings(logprobs="reject")))

        with pytest.raises(BadRequest) as caught:
            async with bench.gateway.admit(generation(traits=("logprobs",))):
                pass

        assert (caught.value.code, caught.value.param) == ("rejected_by_policy", "logprobs")
        assert bench.sent == []
        assert bench.outcomes() == {}
        assert bench.value("mlxd_lane_decisions_total", lane="none", reason="logprobs") == 1


class TestQueue:
    async def test_full_queue_is_refused_with_retry_after(self, admitted):
        """Width 1 and queue 1: one may run and one may wait; others get 503 and when to retry."""
        bench = Bench(terms(width=1, queue=1))
        tickets = await admitted(bench, "a", "b")

        for name in "cdef":
            with pytest.raises(QueueFull) as caught:
                await admitted(bench, name)
            assert caught.value.retry_after == 1

        assert [ticket.lane for ticket in tickets] == [Lane.SERIAL, Lane.SERIAL]
        assert bench.submitted() == [0, 1]

    async def test_rows_that_are_free_are_not_queue(self, admitted):
        """An idle model with no queue at all still takes as many as can run together."""
        bench = Bench(terms(width=3, queue=0))
        await admitted(bench, *"abc")

        with pytest.raises(QueueFull):
            await admitted(bench, "d")

    async def test_serial_requests_do_not_pass_for_parallel_ones(self, admitted):
        """While a serial request runs, everything behind it counts as waiting."""
        bench = Bench(terms(SEED_SERIAL, width=8, queue=1))
        (serial,) = await admitted(bench, "s", traits=("seed",))
        bench.start(serial)
        await admitted(bench, "a")

        with pytest.raises(QueueFull):
            await admitted(bench, "b")

    async def test_cancelled_waiters_make_room(self, admitted):
        """A place in the queue that was given up can be taken at once."""
        bench = Bench(terms(width=1, queue=1))
        (running,) = await admitted(bench, "a")
        bench.start(running)
        async with bench.gateway.admit(generation("b")):
            pass

        await admitted(bench, "c")

        assert bench.outcomes() == {"cancelled": 1}


class TestTokens:
    async def test_tokens_arrive_in_order_and_then_the_outcome(self, admitted):
        """What the engine gives is read in order; usage is the engine's account."""
        bench = Bench(terms())
        (ticket,) = await admitted(bench, "a")
        bench.start(ticket)
        reading = asyncio.create_task(read(ticket))
        bench.step(ticket, 5, 6)
        await asyncio.sleep(0)
        bench.step(ticket, 7)
        bench.finish(ticket, FinishReason.STOP, generated=4)

        assert await reading == [5, 6, 7]
        assert ticket.outcome == Outcome("stop", "stop", 3, 0, 4)

    async def test_outcome_is_unknown_while_it_runs(self, admitted):
        """Asking too early is a fault of the caller."""
        bench = Bench(terms())
        (ticket,) = await admitted(bench, "a")

        with pytest.raises(RuntimeError):
            _ = ticket.outcome

    async def test_reader_that_stopped_reading_frees_its_row(self, admitted):
        """A stalled consumer keeps its tokens, not its row: the next request gets that."""
        bench = Bench(terms(width=1))
        stalled, *_, last = await admitted(bench, *"abcd")
        bench.start(stalled)
        bench.step(stalled, 5, 6, 7)
        bench.finish(stalled, generated=3)

        assert last.id in bench.submitted()
        assert await read(stalled) == [5, 6, 7]

    async def test_failed_step_delivers_what_there_is_and_then_the_error(self, admitted):
        """An error after three tokens comes after those tokens."""
        bench = Bench(terms())
        (ticket,) = await admitted(bench, "a")
        bench.start(ticket)
        bench.step(ticket, 5, 6, 7)
        bench.finish(ticket, FinishReason.ERROR, generated=3, error="NaN in the logits")

        assert [token.token for token in await anext(ticket)] == [5, 6, 7]
        with pytest.raises(EngineFailed, match="NaN in the logits"):
            await anext(ticket)

    async def test_a_format_that_cannot_be_followed_is_the_requests_own_fault(self, admitted):
        """Not the engine's: 400, as when it is seen before."""
        bench = Bench(terms())
        (ticket,) = await admitted(bench, "a")
        bench.start(ticket)
        bench.finish(ticket, FinishReason.FORMAT, error="the response format cannot be followed")

        with pytest.raises(BadRequest, match="cannot be followed"):
            await anext(ticket)


class TestEnds:
    async def test_stop_string_ends_the_row_and_counts_up_to_it(self):
        """Tokens past the one that completed the stop are discarded, not usage."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            bench.start(ticket)
            bench.step(ticket, 5, 6, 7)
            await anext(ticket)
            ticket.end("stop", 2)
            with pytest.raises(StopAsyncIteration):
                await anext(ticket)
            assert ticket.outcome == Outcome("stop", "stop", 3, 0, 2)
        bench.finish(ticket, FinishReason.CANCELLED, generated=4, discarded=1)

        assert bench.cancelled() == [ticket.id]
        assert bench.value("mlxd_generated_tokens_total", lane="batch") == 2
        assert bench.value("mlxd_discarded_tokens_total") == 3
        assert bench.outcomes() == {"stop": 1}

    async def test_stop_string_wins_over_a_length_already_reported(self):
        """The engine's `length` is not final until the text has been looked at."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            bench.start(ticket)
            bench.step(ticket, 5, 6, 7)
            bench.finish(ticket, FinishReason.LENGTH, generated=3)
            await read(ticket)
            ticket.end("stop", 3)

        assert ticket.outcome.name == "stop"
        assert bench.cancelled() == []
        assert bench.outcomes() == {"stop": 1}
        assert bench.value("mlxd_generated_tokens_total", lane="batch") == 3

    async def test_outcome_is_known_once_the_consumer_has_left(self):
        """Whoever leaves before the end, unread tokens or not, was cancelled there."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            bench.start(ticket)
            bench.step(ticket, 5, 6)

        assert ticket.outcome == Outcome("cancelled", "length", 3, 0, 2)
        assert bench.outcomes() == {"cancelled": 1}

    async def test_consumer_with_a_fault_is_an_error_and_no_cancel(self):
        """An exception that leaves the context is the request's end."""
        bench = Bench(terms())

        async def consume() -> None:
            async with bench.gateway.admit(generation("a")):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await consume()

        assert bench.cancelled() == bench.submitted() == [0]
        assert bench.outcomes() == {"error": 1}

    async def test_prompt_tokens_are_counted_as_far_as_they_were_computed(self):
        """A row given up in its prefill counts what was done, and no prefill time."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            bench.start(ticket)
        bench.finish(ticket, FinishReason.CANCELLED, prefilled=2)
        assert bench.value("mlxd_prompt_tokens_total", source="computed") == 2
        assert bench.value("mlxd_prefill_seconds_count", lane="batch") == 0

        async with bench.gateway.admit(generation("b")) as ticket:
            bench.start(ticket)
            bench.finish(ticket, generated=1, prefilled=3)
        assert bench.value("mlxd_prompt_tokens_total", source="computed") == 5
        assert bench.value("mlxd_prefill_seconds_count", lane="batch") == 1

    async def test_end_after_the_context_is_refused(self):
        """A request that was accounted for cannot end again."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            pass

        with pytest.raises(RuntimeError):
            ticket.end("stop", 1)

    async def test_leaving_while_waiting_here_never_reaches_the_engine(self, admitted):
        """The lane is full, five wait and leave: none is ever handed over."""
        bench = Bench(terms(width=1))
        first = await admitted(bench, *"abc")
        bench.start(first[0])
        async with AsyncExitStack() as leaving:
            for name in "defgh":
                await leaving.enter_async_context(bench.gateway.admit(generation(name)))

        for ticket in first:
            bench.finish(ticket)

        assert bench.submitted() == [0, 1, 2]
        assert bench.outcomes() == {"cancelled": 5}

    async def test_leaving_in_the_engines_line_or_row_cancels_there(self):
        """A request that was handed over is given up by a frame, and its place comes back."""
        bench = Bench(terms(width=1))
        async with (
            bench.gateway.admit(generation("a")) as running,
            bench.gateway.admit(generation("b")) as sent,
        ):
            bench.start(running)
            bench.step(running, *range(20))
        assert sorted(bench.cancelled()) == [running.id, sent.id]
        for ticket in (running, sent):
            bench.finish(ticket, FinishReason.CANCELLED, generated=ticket.received)

        assert bench.outcomes() == {"cancelled": 2}
        assert bench.value("mlxd_generated_tokens_total", lane="batch") == 0
        assert bench.value("mlxd_generated_tokens_total", lane="serial") == 20
        assert bench.value("mlxd_running_rows", lane="serial") == 0

    async def test_cancel_that_meets_the_end_is_counted_once(self):
        """The row finishes while its cancel is on the way: one outcome, no frame too many."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as crossed:
            bench.start(crossed)
            bench.step(crossed, 5)
        bench.finish(crossed, FinishReason.LENGTH, generated=1)
        async with bench.gateway.admit(generation("b")) as met:
            bench.start(met)
            bench.step(met, 5)
            bench.finish(met, FinishReason.LENGTH, generated=1)

        assert bench.cancelled() == [crossed.id]
        assert bench.outcomes() == {"cancelled": 1, "length": 1}
        assert bench.value("mlxd_generated_tokens_total", lane="batch") == 2
        async with asyncio.timeout(1):
            await bench.gateway.idle()

    async def test_ceiling_cuts_a_running_request_and_refuses_a_waiting_one(self, admitted):
        """`request_timeout` gives partial text and `length`, or 503 to whoever still waits."""
        bench = Bench(terms(width=1, request_timeout=0.01))
        running, waiting = await admitted(bench, "a", "b")
        bench.start(running)
        bench.step(running, 5, 6)

        assert await read(running) == [5, 6]
        assert running.outcome == Outcome("length", "length", 3, 0, 2)
        with pytest.raises(TimedOut) as caught:
            await read(waiting)
        assert caught.value.retry_after is not None
        assert sorted(bench.cancelled()) == [running.id, waiting.id]

    async def test_dead_engine_ends_everything_at_once(self, admitted):
        """Running and waiting requests get an error, new ones 503; nothing hangs."""
        bench = Bench(terms(width=1))
        tickets = await admitted(bench, *"abcdef")
        bench.start(tickets[0])
        bench.step(tickets[0], 5)

        bench.gateway.lost("killed")

        for ticket in tickets:
            with pytest.raises(EngineFailed, match="killed"):
                await read(ticket)
        with pytest.raises(ModelNotReady):
            await admitted(bench, "late")
        assert bench.cancelled() == []
        async with asyncio.timeout(1):
            await bench.gateway.idle()

    async def test_engine_that_is_followed_by_another_loses_only_what_had_tokens(self, admitted):
        """The rest goes back to the head of the line in its order, and runs on the next."""
        bench = Bench(terms(width=2))
        with_token, without, *line = await admitted(bench, *"abcdef")
        bench.start(with_token, without)
        bench.step(with_token, 5)

        bench.gateway.detach("killed")

        assert [token.token for token in await anext(with_token)] == [5]
        with pytest.raises(EngineFailed, match="killed"):
            await anext(with_token)
        with pytest.raises(ModelNotReady):
            await admitted(bench, "late")
        assert bench.gateway.live() == LiveRequests(running=0, waiting=5)
        bench.sent.clear()
        bench.gateway.attach(EVERYTHING, terms().tuning, bench.sent.append)
        assert bench.submitted() == [without.id, *(ticket.id for ticket in line[:3])]
        for ticket in (without, *line):
            bench.start(ticket)
            bench.finish(ticket, generated=1)
            assert await read(ticket) == []
        assert bench.value("mlxd_replays_total") == 1
        assert bench.value("mlxd_queue_seconds_count", lane="batch") == 6

    async def test_what_an_engine_had_begun_is_run_again_once(self, admitted):
        """The second engine that dies with it ends it; what only waited behind it is no suspect."""
        bench = Bench(terms(width=1))
        suspect, *others = await admitted(bench, *"abc")
        for _ in range(2):
            bench.start(suspect)
            bench.gateway.detach("killed")
            bench.gateway.attach(EVERYTHING, terms(width=1).tuning, bench.sent.append)

        with pytest.raises(EngineFailed):
            await read(suspect)
        assert bench.gateway.live() == LiveRequests(running=0, waiting=2)
        assert bench.submitted()[-2:] == [ticket.id for ticket in others]

    async def test_engine_that_had_begun_nothing_was_ended_by_its_first_request(self, admitted):
        """A request is looked at before its start is told: it cannot kill engines for ever."""
        bench = Bench(terms(width=1))
        first, second = await admitted(bench, *"ab")
        for _ in range(2):
            bench.gateway.detach("killed")
            bench.gateway.attach(EVERYTHING, terms(width=1).tuning, bench.sent.append)

        with pytest.raises(EngineFailed):
            await read(first)
        assert bench.gateway.live() == LiveRequests(running=0, waiting=1)
        assert bench.submitted()[-1] == second.id

    async def test_a_new_engine_learns_what_changed_while_it_loaded(self, admitted):
        """It was started with other settings than those in force when it is ready."""
        bench = Bench(terms(width=1))
        bench.gateway.detach("killed")
        bench.gateway.retune(terms(width=4))
        bench.sent.clear()

        bench.gateway.attach(EVERYTHING, terms(width=1).tuning, bench.sent.append)

        assert bench.sent == [Retune(terms(width=4).tuning)]

    async def test_what_left_while_no_engine_was_there_is_never_sent(self):
        """Its client went away between two engines."""
        bench = Bench(terms())
        async with bench.gateway.admit(generation("a")) as ticket:
            bench.start(ticket)
            bench.gateway.detach("killed")
        bench.sent.clear()

        bench.gateway.attach(EVERYTHING, terms().tuning, bench.sent.append)

        assert bench.sent == []
        assert bench.outcomes() == {"cancelled": 1}

    async def test_a_request_that_cannot_be_sent_ends_and_leaves_nothing_behind(self, admitted):
        """The next one runs, and nothing is counted as waiting."""
        bench = Bench(terms(width=1))

        def refuse(_frame: object) -> None:
            raise OverflowError("not a frame")

        gateway = Gateway(terms(width=1), Ledger(bench.model_metrics))
        gateway.attach(EVERYTHING, terms(width=1).tuning, refuse)
        for _ in range(5):
            with pytest.raises(OverflowError):
                async with gateway.admit(generation("a")):
                    pytest.fail("it was admitted")

        assert gateway.live() == LiveRequests(running=0, waiting=0)
        async with asyncio.timeout(1):
            await gateway.idle()

    async def test_engine_that_names_a_stranger_is_not_believed(self):
        """An unknown id is an error of the protocol, not of a request."""
        bench = Bench(terms())

        with pytest.raises(ProtocolError):
            bench.gateway.started(Started(99))


class TestDrain:
    async def test_closed_gateway_admits_nothing_and_finishes_all(self, admitted):
        """What was accepted goes on, those that wait included; then it is idle."""
        bench = Bench(terms(width=1))
        tickets = await admitted(bench, *"abcde")
        bench.gateway.close()

        with pytest.raises(Draining) as caught:
            await admitted(bench, "late")
        assert caught.value.retry_after is not None
        for ticket in tickets:
            bench.start(ticket)
            bench.finish(ticket, generated=1)
        async with asyncio.timeout(1):
            await bench.gateway.idle()
        bench.gateway.reopen()
        await admitted(bench, "again")

    async def test_deadline_cuts_running_and_refuses_waiting(self, admitted):
        """Partial text with `length` and outcome `drained`; 503 for whoever still waits."""
        bench = Bench(terms(width=1))
        tickets = await admitted(bench, *"abcdef")
        bench.start(tickets[0])
        bench.step(tickets[0], 5, 6)

        bench.gateway.cut()

        assert await read(tickets[0]) == [5, 6]
        assert tickets[0].outcome == Outcome("drained", "length", 3, 0, 2)
        for ticket in tickets[1:]:
            with pytest.raises(Draining):
                await read(ticket)
        assert len(bench.submitted()) == 1 + LOOKAHEAD

    async def test_a_row_that_still_leaves_the_engine_is_not_live(self, admitted):
        """It holds its row until the engine says so; a drain has nothing to wait for."""
        bench = Bench(terms())
        (ended, runs, _) = await admitted(bench, *"abc")
        bench.start(ended, runs)
        ended.end("stop", 0)

        assert bench.gateway.running(Lane.BATCH) == 2
        assert bench.gateway.live() == LiveRequests(running=1, waiting=1)

    async def test_idle_counts_live_requests_only(self):
        """A drain after cancels that met finishes ends at once."""
        bench = Bench(terms(width=4))
        for round_ in range(50):
            async with bench.gateway.admit(generation(str(round_))) as ticket:
                bench.start(ticket)
                if round_ % 2:
                    bench.finish(ticket, generated=1)
            if not round_ % 2:
                bench.finish(ticket, FinishReason.LENGTH, generated=1)
        bench.gateway.close()

        async with asyncio.timeout(1):
            await bench.gateway.idle()
            await bench.gateway.delivered()
        assert bench.outcomes() == {"cancelled": 25, "length": 25}
        assert bench.value("mlxd_running_rows", lane="batch") == 0
        assert bench.value("mlxd_waiting_requests", lane="batch") == 0


def test_terms_of_the_engine_are_a_part_of_all_terms():
    """The engine learns width, chunk, budget and cache size, not the queue or the policy."""
    batch = BatchSettings(
        width=3, prefill_chunk=32, prefill_budget=64, prefix_cache=128, pacing="latency"
    )

    assert Terms(batch, SEED_SERIAL, 1.0).tuning == BatchTuning(3, 32, 64, 128, Pacing.LATENCY)


class TestSeries:
    """What `/metrics` says of a request."""

    def moved(self, bench: Bench, lane: Lane) -> set[str]:
        """Names of the series of this lane, or of none, that are not at 0."""
        return {
            sample.name
            for metric in bench.registry.collect()
            for sample in metric.samples
            if sample.value
            and sample.labels.get("model") == MODEL
            and sample.labels.get("lane", lane) == lane
        }

    async def test_the_same_request_moves_the_same_series_on_either_lane(self, admitted):
        """With the lane as a label; only the prefix cache is the batch's own."""
        found = {}
        for lane, traits in ((Lane.BATCH, ()), (Lane.SERIAL, ("seed",))):
            bench = Bench(terms(SEED_SERIAL))
            async with bench.gateway.admit(generation(traits=traits)) as ticket:
                bench.start(ticket)
                bench.step(ticket, 5, 6)
                bench.finish(ticket, FinishReason.STOP, generated=3, discarded=1, prefilled=3)
                await read(ticket)
            found[lane] = self.moved(bench, lane)

        assert found[Lane.BATCH] - found[Lane.SERIAL] == {"mlxd_prefix_cache_query_tokens_total"}
        assert found[Lane.SERIAL] <= found[Lane.BATCH]
        assert "mlxd_generated_tokens_total" in found[Lane.SERIAL]
        assert "mlxd_inter_token_seconds_count" in found[Lane.SERIAL]
