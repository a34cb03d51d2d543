"""The series: there from the start, true at scrape, gone with their model."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxd.lifecycle import State
from mlxd.metrics import Metrics
from mlxd.metrics.model import ModelMetrics
from mlxd.wire import Lane


class Figures:
    """A model whose figures are plain attributes."""

    def __init__(self, rows: int = 0, state: State = State.READY) -> None:
        self.rows = rows
        self.width = 4
        self.kv_bytes = 10 * rows
        self.prefix_cache_bytes = 0
        self.state = state
        self.draining = state is State.DRAINING

    def running(self, lane: Lane) -> int:
        """All in the batch."""
        return self.rows if lane is Lane.BATCH else 0

    def waiting(self, lane: Lane) -> int:
        """Nobody."""
        return 0


def exposed(registry: CollectorRegistry) -> dict[str, str]:
    """Sample names and the model that each speaks of."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name: sample.labels["model"]
        for family in families
        for sample in family.samples
        if "model" in sample.labels
    }


def test_existing_series_start_at_zero():
    """A counter that nothing has moved yet is 0, not absent."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add("a", Figures())
    ModelMetrics(metrics, "a")

    labels = {"model": "a", "lane": "serial"}
    outcome = {**labels, "outcome": "cancelled"}
    assert registry.get_sample_value("mlxd_requests_total", outcome) == 0
    assert registry.get_sample_value("mlxd_time_to_first_token_seconds_count", labels) == 0
    assert registry.get_sample_value("mlxd_reloads_total", {"result": "failure"}) == 0


def test_no_created_series():
    """Creation times are noise in every dashboard."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add("a", Figures())
    ModelMetrics(metrics, "a")

    assert "_created" not in generate_latest(registry).decode()


def test_process_figures_come_along():
    """The daemon's own memory and descriptors are on the same page."""
    registry = CollectorRegistry()
    Metrics(registry)

    assert registry.get_sample_value("process_open_fds")


def test_gauges_are_read_at_scrape():
    """A gauge is what its owner says now, stored nowhere else."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    figures = Figures(rows=1)
    metrics.add("a", figures)
    figures.rows = 3

    running = registry.get_sample_value("mlxd_running_rows", {"model": "a", "lane": "batch"})
    assert running == 3


def test_two_apps_have_two_registries():
    """Building everything twice in one process is no duplicate."""
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.reloaded(success=True)
    name, labels = "mlxd_reloads_total", {"result": "success"}
    assert one.registry.get_sample_value(name, labels) == 1
    assert other.registry.get_sample_value(name, labels) == 0


def test_replaced_model_counts_on_and_adds_up():
    """While the old host drains, rows add up; the state is the new one's once it serves."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    old, new = Figures(rows=2), Figures(rows=1, state=State.STARTING)
    metrics.add("a", old)
    ModelMetrics(metrics, "a").generated(Lane.BATCH, 7)
    metrics.add("a", new)
    ModelMetrics(metrics, "a").generated(Lane.BATCH, 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "a", **labels})

    assert value("mlxd_running_rows", lane="batch") == 3
    assert value("mlxd_model_state", state="ready") == 1
    old.state, new.state = State.DRAINING, State.READY
    metrics.show("a", new)
    assert value("mlxd_model_state", state="ready") == 1
    metrics.remove("a", old)
    assert value("mlxd_running_rows", lane="batch") == 1
    assert value("mlxd_generated_tokens_total", lane="batch") == 8


def test_removed_models_series_go_and_stay_away():
    """A late fact about a model that is gone does not bring a series back."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    gone, stays = Figures(), Figures()
    metrics.add("gone", gone)
    metrics.add("stays", stays)
    late = ModelMetrics(metrics, "gone")
    ModelMetrics(metrics, "stays")
    before = set(exposed(registry))

    metrics.remove("gone", gone)
    late.ended(Lane.BATCH, "stop", 1.0)
    late.decided("batch", "none")

    assert set(exposed(registry).values()) == {"stays"}
    assert set(exposed(registry)) == before
