"""Rows stay within the engine's share of memory, and lose nothing by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd.engine import memory
from mlxd.engine.pool import SMALLEST_CLASS
from mlxd.wire import BatchTuning, FinishReason, Lane, Preempted, Sampling
from tests.engine.tiny import GREEDY, Engine, full, loaded, mixed_gemma3, prompt, solo

LENGTH, COUNT = SMALLEST_CLASS - 70, 90  # every row joins the first class and crosses into the next


class Watched(Engine):
    """Notes what was preempted and the most bytes that rows and prefix cache held."""

    preempted: list[int]
    most: int

    def step(self) -> None:
        for event in self.scheduler.step():
            if isinstance(event, Preempted):
                self.preempted.append(event.id)
            else:
                self.take(event)
        self.most = max(self.most, self.runner.kv_bytes + self.runner.prefix_bytes)


def _watched(prefix_cache: int = 0) -> Watched:
    engine = Watched(loaded(full()), width=4, prefix_cache=prefix_cache)
    engine.preempted, engine.most = [], 0
    return engine


def _slots(engine: Engine) -> tuple[int, int]:
    """Bytes of a slot of the first and of the second class."""
    (_, small), (_, large), *_ = engine.runner.row_bytes
    return small, large


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(seed=7, temperature=1.0, top_p=0.9),
        Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2),
    ],
)
def test_preempted_rows_are_given_the_tokens_that_they_would_have_had(sampling: Sampling) -> None:
    """All rows cross into a class of which memory holds one slot at a time; none notices."""
    prompts = [prompt(LENGTH, seed) for seed in range(4)]
    undisturbed = _watched()
    for number, tokens in enumerate(prompts):
        undisturbed.submit(number, tokens, COUNT, sampling=sampling)
    undisturbed.run()
    assert not undisturbed.preempted

    engine = _watched()
    small, large = _slots(engine)
    limit = 4 * small + large + small
    engine.runner.limit(limit)
    for number, tokens in enumerate(prompts):
        engine.submit(number, tokens, COUNT, sampling=sampling)
    engine.run()
    assert engine.preempted
    assert 0 not in engine.preempted  # the oldest never gives way
    assert engine.tokens == undisturbed.tokens
    assert [len(each) for each in engine.logprobs.values()] == [COUNT] * 4
    assert all(end.reason is FinishReason.LENGTH for end in engine.finished.values())
    assert engine.most <= limit


def test_the_prefix_cache_takes_what_rows_leave_and_gives_it_back() -> None:
    """A full cache does not keep a row waiting."""
    engine = _watched(prefix_cache=1 << 30)
    small, _large = _slots(engine)
    limit = 3 * small
    engine.runner.limit(limit)
    for number in range(6):
        engine.submit(number, prompt(200, number), 5)
        engine.run()
    assert engine.runner.prefix_bytes > 0
    engine.submit(9, prompt(400, 9), 5)
    engine.run()
    assert engine.finished[9].reason is FinishReason.LENGTH
    assert not engine.preempted
    assert engine.most <= limit


def test_a_smaller_share_makes_rows_give_way_at_once() -> None:
    """The oldest goes on; what must leave comes back when there is room."""
    engine = _watched()
    small, _large = _slots(engine)
    prompts = [prompt(100, seed) for seed in range(4)]
    for number, tokens in enumerate(prompts):
        engine.submit(number, tokens, 60)
    for _ in range(20):
        engine.step()
    engine.runner.limit(2 * small)
    engine.step()
    engine.step()
    assert engine.runner.kv_bytes <= 2 * small
    engine.run()
    assert set(engine.preempted) == {2, 3}
    for number, tokens in enumerate(prompts):
        assert engine.tokens[number] == solo(engine.model, tokens, 60)


def test_windows_count_what_they_hold() -> None:
    """A sliding layer's ring takes the same in every class."""
    engine = Engine(loaded(mixed_gemma3()))
    sizes = [size for _capacity, size in engine.runner.row_bytes]
    classes = [capacity for capacity, _size in engine.runner.row_bytes]
    assert sizes == sorted(sizes)
    assert sizes[1] - sizes[0] < sizes[0] * (classes[1] - classes[0]) / classes[0]


def test_limits_of_the_groups_around_a_process_count(tmp_path: Path) -> None:
    """A unit's own group, and those above it; "max" is none; both versions of the interface."""
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    unit = root / "system.slice" / "mlxd.service"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text("1000\n")
    (unit.parent / "memory.max").write_text("900\n")
    (root / "memory.max").write_text("max\n")
    own.write_text("0::/system.slice/mlxd.service\n")
    assert list(memory.group_limits(own, root)) == [1000, 900]
    old = root / "memory" / "docker" / "x"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("800")
    own.write_text("7:cpu:/elsewhere\n4:memory:/docker/x\n")
    assert list(memory.group_limits(own, root)) == [800]
    assert list(memory.group_limits(tmp_path / "nothing", root)) == []


def test_what_a_gpu_can_give() -> None:
    """Metal recommends a working set; CUDA says what is free, of which we may hold some."""
    metal = {"max_recommended_working_set_size": 700, "memory_size": 1000}
    assert memory.of_gpu(metal, held=50) == 700
    assert memory.of_gpu({"free_memory": 900, "total_memory": 2000}, held=100) == 900


def test_a_narrower_width_makes_no_running_row_give_way() -> None:
    """Rows above the width stay where they are, and nothing is counted that is not allocated."""
    engine = _watched()
    small, _large = _slots(engine)
    for number in range(3):
        engine.submit(number, prompt(20, number), 30)
    for _ in range(6):
        engine.step()
    engine.runner.limit(4 * small)
    engine.scheduler.retune(BatchTuning(2, 64, 128))
    engine.run()
    assert not engine.preempted


def test_a_row_that_waits_leaves_the_prefix_cache_alone() -> None:
    """It takes nothing before it is admitted."""
    engine = _watched(prefix_cache=1 << 30)
    small, _large = _slots(engine)
    engine.runner.limit(4 * small)
    engine.submit(0, prompt(200, 0), 60)
    for _ in range(10):
        engine.step()
    kept = engine.runner.prefix_bytes
    assert kept > 0
    engine.submit(1, prompt(3000, 1), 5)  # waits for all of it
    for _ in range(4):
        engine.step()
    assert engine.runner.prefix_bytes == kept


def test_the_serial_lane_counts_its_whole_answer() -> None:
    """What does not fit ends with an error before it has computed anything."""
    engine = _watched()
    small, _large = _slots(engine)
    engine.runner.limit(3 * small)
    engine.submit(0, prompt(20, 0), 3000, lane=Lane.SERIAL)
    engine.submit(1, prompt(20, 1), 10, lane=Lane.SERIAL)
    engine.run()
    assert engine.finished[0].reason is FinishReason.ERROR
    assert "memory" in (engine.finished[0].error or "")
    assert engine.finished[1].reason is FinishReason.LENGTH
