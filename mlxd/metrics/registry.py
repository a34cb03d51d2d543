"""Every metric of the daemon, declared once on the registry that is passed in.

Counters and histograms are moved by whoever owns the fact, through
`ModelMetrics`. Gauges are not stored: they are read from their owner at scrape.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from mlxd import __version__
from mlxd.lifecycle import State
from mlxd.metrics.vllm import VllmHistograms
from mlxd.wire import Lane

#: Lane of a request that was refused before it had one.
NO_LANE = "none"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 1800)
_STEP = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30)
_ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Figures(Protocol):
    """What the gauges of one model are read from. A host is one."""

    def running(self, lane: Lane) -> int:
        """Requests that hold a row."""

    def waiting(self, lane: Lane) -> int:
        """Admitted requests that hold none yet."""

    @property
    def width(self) -> int:
        """Rows that may decode together."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the engine holds."""

    @property
    def kv_budget(self) -> int:
        """Bytes that KV and the prefix cache may take together."""

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the engine's prefix cache."""

    @property
    def state(self) -> State:
        """Where the model is in its life."""

    @property
    def draining(self) -> bool:
        """Whether the model admits nothing."""


class Metrics:
    """The daemon's series, and those of each model for as long as it is there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Process-wide in the client library, and without types; there is no other switch.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=registry)
        self.registry = registry
        self.vllm = VllmHistograms()
        self._sources: dict[str, list[Figures]] = {}
        self._by_model: list[Counter | Gauge | Histogram] = []
        self._declare_counters()
        self._declare_gauges()
        self._declare_histograms()
        self._declare_daemon()

    def _declare_counters(self) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            metric = Counter(name, help_, ["model", *labels], registry=self.registry)
            self._by_model.append(metric)
            return metric

        self.requests = counter(
            "mlxd_requests_total", "Requests by how they ended.", "lane", "outcome"
        )
        self.lane_decisions = counter(
            "mlxd_lane_decisions_total",
            "Lane that the policy chose, and the trait that decided; lane none = rejected.",
            "lane",
            "reason",
        )
        self.prompt_tokens = counter(
            "mlxd_prompt_tokens_total", "Prompt tokens, computed or taken from a cache.", "source"
        )
        self.generated_tokens = counter(
            "mlxd_generated_tokens_total",
            "Generated tokens that count as usage, those of cancelled requests included.",
            "lane",
        )
        self.discarded_tokens = counter(
            "mlxd_discarded_tokens_total", "Tokens computed past the end of their request."
        )

        self.replays = counter(
            "mlxd_replays_total", "Requests run again because their engine died before a token."
        )
        self.engine_restarts = counter(
            "mlxd_engine_restarts_total", "Engines started in the place of one that died."
        )
        self.preemptions = counter(
            "mlxd_preemptions_total", "Rows that gave up their place and were computed again."
        )
        self.prefix_cache_query_tokens = counter(
            "mlxd_prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hit_tokens = counter(
            "mlxd_prefix_cache_hit_tokens_total", "Of those, tokens that it held."
        )

    def _declare_gauges(self) -> None:
        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            metric = Gauge(name, help_, ["model", *labels], registry=self.registry)
            self._by_model.append(metric)
            return metric

        self.running_rows = gauge("mlxd_running_rows", "Requests that hold a row.", "lane")
        self.waiting_requests = gauge(
            "mlxd_waiting_requests", "Admitted requests without a row.", "lane"
        )
        self.batch_width = gauge("mlxd_batch_width", "Rows that may decode together.")
        self.kv_budget_bytes = gauge(
            "mlxd_kv_budget_bytes", "Bytes that KV and the prefix cache may take together."
        )
        self.kv_bytes = gauge("mlxd_kv_bytes", "Bytes of KV held by the engine.")
        self.prefix_cache_bytes = gauge(
            "mlxd_prefix_cache_bytes", "Bytes of the engine's prefix cache."
        )
        self.model_state = gauge(
            "mlxd_model_state", "1 for the state that the model is in.", "state"
        )
        self.draining = gauge("mlxd_draining", "1 while the model admits nothing.")

    def _declare_histograms(self) -> None:
        def histogram(name: str, help_: str, buckets: Sequence[float], *labels: str) -> Histogram:
            metric = Histogram(
                name, help_, ["model", *labels], buckets=buckets, registry=self.registry
            )
            self._by_model.append(metric)
            return metric

        self.time_to_first_token = histogram(
            "mlxd_time_to_first_token_seconds",
            "From admission to the first token.",
            _LATENCY,
            "lane",
        )
        self.inter_token = histogram(
            "mlxd_inter_token_seconds", "Between two tokens of one request.", _STEP, "lane"
        )
        self.request_seconds = histogram(
            "mlxd_request_seconds", "From admission to the end.", _LATENCY, "lane"
        )
        self.queue_seconds = histogram(
            "mlxd_queue_seconds", "From admission to a row.", _LATENCY, "lane"
        )
        self.prefill_seconds = histogram(
            "mlxd_prefill_seconds", "Prefill of one request.", _LATENCY, "lane"
        )
        self.step_seconds = histogram("mlxd_step_seconds", "One iteration of the engine.", _STEP)
        self.step_rows = histogram("mlxd_step_rows", "Rows decoded in a step.", _ROWS)

    def _declare_daemon(self) -> None:
        self.reloads = Counter(
            "mlxd_reloads_total", "Configuration reloads.", ["result"], registry=self.registry
        )
        for result in ("success", "failure"):
            self.reloads.labels(result)
        self.reload_successful = Gauge(
            "mlxd_config_last_reload_successful",
            "1 if the last reading of the configuration succeeded.",
            registry=self.registry,
        )
        self.reload_time = Gauge(
            "mlxd_config_last_reload_success_timestamp_seconds",
            "Unix time of the last successful reading of the configuration.",
            registry=self.registry,
        )
        Info("mlxd_build", "Version of mlxd and its interpreter.", registry=self.registry).info(
            {"version": __version__, "python": platform.python_version()}
        )

    def configured(self) -> None:
        """The configuration in use was read just now."""
        self.reload_successful.set(1)
        self.reload_time.set_to_current_time()

    def reloaded(self, *, success: bool) -> None:
        """A reload was asked for, and took effect or changed nothing."""
        self.reloads.labels("success" if success else "failure").inc()
        if success:
            self.configured()
        else:
            self.reload_successful.set(0)

    def add(self, model: str, figures: Figures) -> None:
        """Count these figures in; the first to come is also the one whose state is shown."""
        self._sources.setdefault(model, []).insert(0, figures)
        self._read_gauges(model)

    def show(self, model: str, figures: Figures) -> None:
        """Show the state of these from now on; older ones still count."""
        sources = self._sources[model]
        sources.remove(figures)
        sources.append(figures)

    def remove(self, model: str, figures: Figures) -> None:
        """Stop reading these figures; the series go with the last of them."""
        sources = self._sources[model]
        sources.remove(figures)
        if sources:
            return
        del self._sources[model]
        for metric in self._by_model:
            metric.remove_by_labels({"model": model})
        self.vllm.remove(model)

    def _read_gauges(self, model: str) -> None:
        sources = self._sources[model]

        def total(read: Callable[[Figures], float]) -> Callable[[], float]:
            return lambda: float(sum(read(figures) for figures in sources))

        def shown(read: Callable[[Figures], float]) -> Callable[[], float]:
            return lambda: float(read(sources[-1]))

        def running(lane: Lane) -> Callable[[Figures], float]:
            return lambda figures: figures.running(lane)

        def waiting(lane: Lane) -> Callable[[Figures], float]:
            return lambda figures: figures.waiting(lane)

        def is_in(state: State) -> Callable[[Figures], float]:
            return lambda figures: figures.state is state

        for lane in Lane:
            self.running_rows.labels(model, lane).set_function(total(running(lane)))
            self.waiting_requests.labels(model, lane).set_function(total(waiting(lane)))
        for state in State:
            self.model_state.labels(model, state).set_function(shown(is_in(state)))
        self.kv_budget_bytes.labels(model).set_function(total(lambda figures: figures.kv_budget))
        self.kv_bytes.labels(model).set_function(total(lambda figures: figures.kv_bytes))
        self.prefix_cache_bytes.labels(model).set_function(
            total(lambda figures: figures.prefix_cache_bytes)
        )
        self.batch_width.labels(model).set_function(shown(lambda figures: figures.width))
        self.draining.labels(model).set_function(shown(lambda figures: figures.draining))
