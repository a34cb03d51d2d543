"""The memory budget is split among engines, and no request is taken that could never fit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from mlxd.errors import BadRequest
from mlxd.memory import MemoryBudget, Needs, NoRoom, row_needs, shares
from mlxd.wire import Budget, Capabilities, Held, Preempted, Ready
from tests.daemon.fakes import EVERYTHING, Bench, generation, terms

CLASSES = [(512, 100), (2048, 400), (4096, 800)]


def ready(
    weights: int,
    working: int = 0,
    device: int = 10_000,
    classes: Sequence[tuple[int, int]] = (),
) -> Ready:
    """What an engine says of itself."""
    return Ready(
        Capabilities(256, 1024, [], None, [], row_bytes=list(classes)),
        0.1,
        0.1,
        weight_bytes=weights,
        working_bytes=working,
        device_bytes=device,
    )


def test_what_weights_and_work_leave_is_split_in_equal_parts() -> None:
    """Whatever the sizes of the models."""
    needs = {"a": Needs(500, 10, None), "b": Needs(100, 90, None)}
    assert shares(1000, needs) == {"a": 150, "b": 150}


def test_a_grant_comes_off_first_as_far_as_there_is_as_much() -> None:
    """The others share the rest."""
    needs = {"a": Needs(100, 0, 300), "b": Needs(100, 0, None), "c": Needs(100, 0, None)}
    assert shares(1000, needs) == {"a": 300, "b": 200, "c": 200}
    assert shares(500, needs) == {"a": 200, "b": 0, "c": 0}


def test_weights_above_the_budget_leave_nothing() -> None:
    """Never a negative share."""
    assert shares(100, {"a": Needs(500, 0, None)}) == {"a": 0}


def test_every_engine_is_told_whenever_the_split_changes() -> None:
    """One comes, the configuration changes, one goes."""
    told: list[tuple[str, int]] = []
    budget = MemoryBudget(1000)
    budget.join("a", ready(200), None, lambda size: told.append(("a", size)))
    budget.join("b", ready(200), None, lambda size: told.append(("b", size)))
    budget.resize(600)
    budget.leave("a")
    budget.leave("a")  # once is enough
    assert told == [("a", 800), ("a", 300), ("b", 300), ("a", 100), ("b", 100), ("b", 400)]


def test_a_grant_can_change_while_its_engine_serves() -> None:
    """As by a reload; a grant to nobody is no error."""
    told: list[int] = []
    budget = MemoryBudget(1000)
    budget.grant("a", 100)
    budget.join("a", ready(200), None, told.append)
    budget.grant("a", 300)
    budget.grant("a", 300)
    assert told == [800, 300]


def test_an_engine_that_leaves_too_little_is_refused_and_those_that_serve_keep_their_shares() -> (
    None
):
    """A model too large for the budget is its own failure."""
    told: list[int] = []
    budget = MemoryBudget(1000)
    budget.join("a", ready(200, classes=CLASSES), None, told.append)
    with pytest.raises(NoRoom, match="2 engines take 1000 bytes of the memory budget of 1000"):
        budget.join("b", ready(800, classes=CLASSES), None, told.append)
    with pytest.raises(NoRoom, match="its smallest takes 200"):
        budget.join("b", ready(500, classes=CLASSES), None, told.append)
    assert told == [800]
    budget.join("b", ready(300), None, told.append)
    assert told == [800, 250, 250]


def test_without_a_configured_budget_the_device_says_what_there_is() -> None:
    """The smallest counts, where engines disagree."""
    told: dict[str, int] = {}
    budget = MemoryBudget(None)
    budget.join("a", ready(0, device=1000), None, lambda size: told.update(a=size))
    assert told == {"a": 1000}
    budget.join("b", ready(0, device=800), None, lambda size: told.update(b=size))
    assert told == {"a": 400, "b": 400}


def test_a_row_needs_its_last_slot_and_what_it_comes_from() -> None:
    """Its prefill's state, which may be 512 tokens longer, or the slot of the class below."""
    assert row_needs(CLASSES, prompt=10, max_tokens=5) == 100 + 101
    assert row_needs(CLASSES, prompt=500, max_tokens=500) == 400 + 197
    assert row_needs(CLASSES, prompt=100, max_tokens=3000) == 800 + 400
    assert row_needs(CLASSES, prompt=4000, max_tokens=90_000) == 800 + 881
    assert row_needs([], prompt=4000, max_tokens=90_000) == 0


async def test_what_could_never_fit_is_refused_with_the_figures() -> None:
    """A 400 that names the field, before the engine hears of it."""
    bench = Bench(terms(), msgspec.structs.replace(EVERYTHING, row_bytes=CLASSES))
    bench.gateway.allow(450)
    with pytest.raises(BadRequest, match=r"558 bytes of KV.*budget is 450") as refused:
        async with bench.gateway.admit(generation(prompt=[1] * 300, max_tokens=700)):
            pass
    assert refused.value.param == "max_tokens"
    async with bench.gateway.admit(generation(prompt=[1] * 300, max_tokens=100)):
        assert bench.submitted() == [0]


async def test_the_engine_hears_its_budget_before_any_request() -> None:
    """Also one that comes after another, with a request waiting for it."""
    bench = Bench(terms())
    bench.gateway.allow(450)
    async with bench.gateway.admit(generation()):
        bench.gateway.detach("gone")
        again: list[object] = []
        bench.gateway.attach(EVERYTHING, terms().tuning, again.append)
        assert again[0] == Budget(450)
        assert len(again) == 2
    assert bench.sent[0] == Budget(450)


async def test_bytes_that_are_given_back_without_a_step_are_told() -> None:
    """An idle engine's gauges are not those of its last step."""
    bench = Bench(terms())
    async with bench.gateway.admit(generation()) as ticket:
        bench.start(ticket)
        bench.step(ticket, 65)
        assert bench.value("mlxd_kv_bytes") == 64
        bench.finish(ticket, generated=1)
    bench.gateway.held(Held(0, 7))
    assert bench.value("mlxd_kv_bytes") == 0
    assert bench.value("mlxd_prefix_cache_bytes") == 7


async def test_a_preempted_row_is_counted_and_goes_on() -> None:
    """Its client sees nothing of it."""
    bench = Bench(terms())
    async with bench.gateway.admit(generation()) as ticket:
        bench.start(ticket)
        bench.step(ticket, 65)
        bench.gateway.preempted(Preempted(ticket.id))
        bench.step(ticket, 66)
        assert bench.value("mlxd_preemptions_total") == 1
        bench.finish(ticket, generated=2)
    assert bench.outcomes() == {"length": 1}
