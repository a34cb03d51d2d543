"""The series: there from the start, true at scrape, gone with their model."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxd.lifecycle import State
from mlxd.metrics import Metrics
from mlxd.metrics.model import ModelMetrics
from mlxd.metrics.vllm import Life, VllmNames
from mlxd.serving import Timings
from mlxd.wire import Lane


class Figures:
    """A model whose figures are plain attributes."""

    def __init__(self, rows: int = 0, state: State = State.READY) -> None:
        self.rows = rows
        self.width = 4
        self.kv_bytes = 10 * rows
        self.kv_budget = 100
        self.prefix_cache_bytes = 0
        self.state = state
        self.draining = state is State.DRAINING

    def running(self, lane: Lane) -> int:
        """All in the batch."""
        return self.rows if lane is Lane.BATCH else 0

    def waiting(self, lane: Lane) -> int:
        """Nobody."""
        return 0


def life(seconds: float = 1.0, *, completion_tokens: int = 5) -> Life:
    """Of a request that came to its end."""
    timings = Timings(admitted=0.0, queue=0.1, prefill=0.3, decode=0.6)
    return Life(
        seconds, timings, prompt_tokens=7, completion_tokens=completion_tokens, max_tokens=9
    )


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
    late.ended(Lane.BATCH, "stop", life())
    late.decided("batch", "none")

    assert set(exposed(registry).values()) == {"stays"}
    assert set(exposed(registry)) == before


class TestVllmNames:
    """The same figures as vLLM calls them."""

    #: What vLLM's published Grafana dashboard and its SLO tiles ask for.
    CLASSIC = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        "num_requests_waiting_by_reason",
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"),
        *("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count"),
        *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
        *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
        *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
        *("request_time_per_output_token_seconds_bucket", "num_preemptions_total"),
        *("prefix_cache_hits_total", "prefix_cache_queries_total"),
        "prompt_tokens_by_source_total",
    )

    @pytest.fixture
    def metrics(self) -> Metrics:
        """Of one model, with vLLM's names beside its own."""
        metrics = Metrics(CollectorRegistry())
        metrics.registry.register(VllmNames(metrics, lambda: True))
        metrics.add("a", Figures(rows=2))
        return metrics

    def value(self, metrics: Metrics, name: str, **labels: str) -> float | None:
        labels = {"model_name": "a", "engine": "0", **labels}
        return metrics.registry.get_sample_value(f"vllm:{name}", labels)

    def names(self, metrics: Metrics) -> set[str]:
        text = generate_latest(metrics.registry).decode()
        return {
            sample.name.removeprefix("vllm:")
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }

    def test_its_dashboards_find_everything(self, metrics: Metrics) -> None:
        """From the start, at 0."""
        ModelMetrics(metrics, "a")

        assert set(self.CLASSIC) <= self.names(metrics)

    def test_counters_and_gauges_are_the_native_ones(self, metrics: Metrics) -> None:
        """Renamed at scrape, with mlxd's lanes summed up and outcomes in vLLM's words."""
        model = ModelMetrics(metrics, "a")
        model.prefilled(Lane.BATCH, computed=5, cached=3, seconds=0.1)
        model.generated(Lane.BATCH, 2)
        model.generated(Lane.SERIAL, 4)
        model.ended(Lane.BATCH, "cancelled", life())
        model.ended(Lane.SERIAL, "drained", life())
        model.ended(Lane.SERIAL, "tool_calls", life())
        model.rejected()

        assert self.value(metrics, "num_requests_running") == 2
        assert self.value(metrics, "kv_cache_usage_perc") == 0.2
        assert self.value(metrics, "prompt_tokens_total") == 8
        assert self.value(metrics, "prompt_tokens_cached_total") == 3
        by_source = "prompt_tokens_by_source_total"
        assert self.value(metrics, by_source, source="local_compute") == 5
        assert self.value(metrics, "generation_tokens_total") == 6
        ends = {
            reason: self.value(metrics, "request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert ends == {"stop": 1, "length": 0, "abort": 2, "error": 0}

    @pytest.mark.parametrize(
        ("held", "budget", "usage"), [(0, 0, 0.0), (25, 100, 0.25), (150, 100, 1.0)]
    )
    def test_kv_usage_is_a_share_of_the_budget(
        self, metrics: Metrics, held: int, budget: int, usage: float
    ) -> None:
        """0 to 1: before anything is loaded, and when a budget shrinks below what rows hold."""
        figures = Figures()
        figures.kv_bytes, figures.kv_budget = held, budget
        metrics.add("b", figures)

        labels = {"model_name": "b", "engine": "0"}
        found = metrics.registry.get_sample_value("vllm:kv_cache_usage_perc", labels)
        assert found == usage

    def test_a_requests_parts_are_observed_once_at_its_end(self, metrics: Metrics) -> None:
        """Queue, prefill and decode; the time of a token is that of those after the first."""
        model = ModelMetrics(metrics, "a")
        model.ended(Lane.BATCH, "stop", life(1.0, completion_tokens=5))
        model.ended(Lane.BATCH, "length", life(1.0, completion_tokens=1))

        assert self.value(metrics, "e2e_request_latency_seconds_count") == 2
        assert self.value(metrics, "request_decode_time_seconds_sum") == pytest.approx(1.2)
        assert self.value(metrics, "request_inference_time_seconds_sum") == pytest.approx(1.8)
        assert self.value(metrics, "request_time_per_output_token_seconds_count") == 1
        assert self.value(metrics, "request_time_per_output_token_seconds_sum") == 0.6 / 4

    def test_what_a_request_did_not_come_to_is_not_observed(self, metrics: Metrics) -> None:
        """One that was cancelled while it waited has no prefill of 0 seconds."""
        model = ModelMetrics(metrics, "a")
        model.ended(Lane.BATCH, "cancelled", Life(1.0, Timings(admitted=0.0), 7, 0, 9))

        assert self.value(metrics, "e2e_request_latency_seconds_count") == 1
        for part in ("queue", "prefill", "decode", "inference"):
            assert self.value(metrics, f"request_{part}_time_seconds_count") == 0, part

    @pytest.mark.parametrize(
        ("name", "boundaries"),
        [
            ("time_to_first_token_seconds", "0.1 0.25 0.5 0.75 1.0 2.5 5.0 10.0 2560.0"),
            ("request_time_per_output_token_seconds", "0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.5"),
            ("e2e_request_latency_seconds", "0.3 0.8 1.5 15.0 40.0 7680.0"),
            ("request_prompt_tokens", "1.0 2.0 5.0 10.0 20.0 50.0 100000.0"),
        ],
    )
    def test_bucket_boundaries_are_vllms(
        self, metrics: Metrics, name: str, boundaries: str
    ) -> None:
        """Its tiles ask for exact boundaries."""
        ModelMetrics(metrics, "a")

        for le in boundaries.split():
            assert self.value(metrics, f"{name}_bucket", le=le) == 0, le

    def test_series_go_with_their_model(self, metrics: Metrics) -> None:
        """A late fact brings none back."""
        figures = Figures()
        metrics.add("b", figures)
        late = ModelMetrics(metrics, "b")
        metrics.remove("b", figures)
        late.ended(Lane.BATCH, "stop", life())

        assert 'model_name="b"' not in generate_latest(metrics.registry).decode()

    def test_they_can_be_left_out_and_come_back_whole(self) -> None:
        """The switch is live, and what happened meanwhile is not lost."""
        metrics = Metrics(CollectorRegistry())
        wanted = False
        metrics.registry.register(VllmNames(metrics, lambda: wanted))
        metrics.add("a", Figures())
        ModelMetrics(metrics, "a").ended(Lane.BATCH, "stop", life())

        assert self.names(metrics) == set()
        wanted = True
        assert self.value(metrics, "e2e_request_latency_seconds_count") == 1
