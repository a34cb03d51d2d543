"""vLLM's names for the same facts, so that dashboards made for it show mlxd.

Names, labels and bucket boundaries are those of vLLM 0.33.0. Gauges and counters
are mlxd's own, renamed at scrape; histograms have boundaries of their own and are
kept beside them, whether or not they are shown, so that showing them leaves no hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from mlxd.serving import Timings

if TYPE_CHECKING:
    from mlxd.metrics.registry import Metrics

#: One engine a model, as vLLM counts them.
ENGINE = "0"
LABELS = ("model_name", "engine")
#: mlxd's outcomes in vLLM's words. What never was admitted is no request of an engine there.
FINISHED_REASONS = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cancelled": "abort",
    "drained": "abort",
    "error": "error",
}
#: By model and further labels.
Values = Mapping[tuple[str, ...], float]

_SOURCES = {"computed": "local_compute", "cached": "local_cache_hit"}

_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
# Its own end at each model's context; these are for all.
_TOKENS = (*(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5)), 10**6)
_CHOICES = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Life:
    """What one admitted request was, known at its end."""

    seconds: float  # from admission to the end
    timings: Timings
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int


class VllmHistograms:
    """The histograms that vLLM has, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._all: list[Histogram] = []

        def histogram(name: str, help_: str, buckets: Iterable[float]) -> Histogram:
            metric = Histogram(
                f"vllm:{name}", help_, LABELS, buckets=tuple(buckets), registry=self.registry
            )
            self._all.append(metric)
            return metric

        self.first_token = histogram(
            "time_to_first_token_seconds", "From admission to the first token.", _FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", _PER_TOKEN
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first.",
            _PER_TOKEN,
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From admission to the end.", _LATENCY)
        self.queue = histogram("request_queue_time_seconds", "From admission to a row.", _LATENCY)
        self.inference = histogram(
            "request_inference_time_seconds", "From a row to the last token.", _LATENCY
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From a row to the first token.", _LATENCY
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY
        )
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest choice.",
            _TOKENS,
        )
        self.params_n = histogram("request_params_n", "Choices that requests ask for.", _CHOICES)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Token limits of requests.", _TOKENS
        )

    def of(self, model: str) -> VllmModel:
        """One model's, all at 0 from now on."""
        return VllmModel(self, model)

    def remove(self, model: str) -> None:
        """A model is gone, and so are its series."""
        for metric in self._all:
            metric.remove_by_labels({"model_name": model})


class VllmModel:
    """One model's histograms; children are kept, so that late facts bring nothing back."""

    def __init__(self, histograms: VllmHistograms, model: str) -> None:
        def child(metric: Histogram) -> Histogram:
            return metric.labels(model, ENGINE)

        self._first_token = child(histograms.first_token)
        self._inter_token = child(histograms.inter_token)
        self._per_token = child(histograms.per_token)
        self._e2e = child(histograms.e2e)
        self._queue = child(histograms.queue)
        self._inference = child(histograms.inference)
        self._prefill = child(histograms.prefill)
        self._decode = child(histograms.decode)
        self._prompt_tokens = child(histograms.prompt_tokens)
        self._generation_tokens = child(histograms.generation_tokens)
        self._max_generation_tokens = child(histograms.max_generation_tokens)
        self._params_n = child(histograms.params_n)
        self._params_max_tokens = child(histograms.params_max_tokens)

    def first_token(self, seconds: float) -> None:
        """A request's first token came this long after its admission."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Another token came this long after the one before."""
        self._inter_token.observe(seconds)

    def ended(self, life: Life) -> None:
        """An admitted request ended."""
        queue, prefill, decode = life.timings.queue, life.timings.prefill, life.timings.decode
        self._e2e.observe(life.seconds)
        if queue is not None:
            self._queue.observe(queue)
        if prefill is not None and decode is not None:
            self._prefill.observe(prefill)
            self._decode.observe(decode)
            self._inference.observe(prefill + decode)
            if life.completion_tokens > 1:
                self._per_token.observe(decode / (life.completion_tokens - 1))
        self._prompt_tokens.observe(life.prompt_tokens)
        self._generation_tokens.observe(life.completion_tokens)
        self._max_generation_tokens.observe(life.completion_tokens)
        self._params_n.observe(1)
        self._params_max_tokens.observe(life.max_tokens)


class VllmNames(Collector):
    """What is scraped under vLLM's names, while they are wanted."""

    def __init__(self, metrics: Metrics, wanted: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._wanted = wanted

    def describe(self) -> Iterator[Metric]:
        """Names, so that registering asks for no values."""
        yield from self._metrics.vllm.registry.collect()

    def collect(self) -> Iterator[Metric]:
        """All series, or none."""
        if not self._wanted():
            return
        yield from self._gauges()
        yield from self._counters()
        yield from self._metrics.vllm.registry.collect()

    def _gauges(self) -> Iterator[Metric]:
        native = self._metrics
        running, waiting = _by_model(native.running_rows), _by_model(native.waiting_requests)
        kv, budget = _by_model(native.kv_bytes), _by_model(native.kv_budget_bytes)
        yield _gauge("num_requests_running", "Requests that hold a row.", _keyed(running))
        yield _gauge("num_requests_waiting", "Admitted requests without a row.", _keyed(waiting))
        # mlxd has one reason to wait: there is no row yet.
        reasons: dict[tuple[str, ...], float] = {}
        for model, count in waiting.items():
            reasons |= {(model, "capacity"): count, (model, "deferred"): 0.0}
        yield _gauge("num_requests_waiting_by_reason", "Those, by why.", reasons, "reason")
        yield _gauge(
            "kv_cache_usage_perc",
            "KV of rows, of what KV and prefix cache may take together. 1 is all.",
            # A budget that has just shrunk may be below what rows still hold.
            {(model,): min(held / max(budget[model], 1), 1.0) for model, held in kv.items()},
        )

    def _counters(self) -> Iterator[Metric]:
        native = self._metrics
        for name, help_, counter in (
            ("prompt_tokens", "Prompt tokens, cached ones included.", native.prompt_tokens),
            ("generation_tokens", "Generated tokens.", native.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", native.prefix_cache_query_tokens),
            ("prefix_cache_hits", "Of those, tokens found.", native.prefix_cache_hit_tokens),
            ("num_preemptions", "Rows that gave up their place.", native.preemptions),
        ):
            yield _counter(name, help_, _keyed(_by_model(counter)))
        sources = _by_model_and(native.prompt_tokens, "source", _SOURCES)
        yield _counter(
            "prompt_tokens_by_source", "Prompt tokens, by where from.", sources, "source"
        )
        cached = {key[:1]: n for key, n in sources.items() if key[1] == _SOURCES["cached"]}
        yield _counter("prompt_tokens_cached", "Prompt tokens from the cache.", cached)
        ends = _by_model_and(native.requests, "outcome", FINISHED_REASONS)
        yield _counter("request_success", "Requests by how they ended.", ends, "finished_reason")


def _by_model(metric: Counter | Gauge) -> dict[str, float]:
    """Each model's value, other labels summed up."""
    found: dict[str, float] = {}
    for sample in _samples(metric):
        model = sample.labels["model"]
        found[model] = found.get(model, 0.0) + sample.value
    return found


def _by_model_and(
    metric: Counter, label: str, names: Mapping[str, str]
) -> dict[tuple[str, ...], float]:
    """Each model's values by this label in vLLM's words; what has none there is left out."""
    found: dict[tuple[str, ...], float] = {}
    for sample in _samples(metric):
        if sample.labels[label] in names:
            key = sample.labels["model"], names[sample.labels[label]]
            found[key] = found.get(key, 0.0) + sample.value
    return found


def _samples(metric: Counter | Gauge) -> Iterator[Sample]:
    for family in metric.collect():
        yield from family.samples


def _keyed(values: Mapping[str, float]) -> Values:
    return {(model,): value for model, value in values.items()}


def _gauge(name: str, help_: str, values: Values, *more: str) -> Metric:
    return _filled(GaugeMetricFamily(f"vllm:{name}", help_, labels=(*LABELS, *more)), values)


def _counter(name: str, help_: str, values: Values, *more: str) -> Metric:
    return _filled(CounterMetricFamily(f"vllm:{name}", help_, labels=(*LABELS, *more)), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for (model, *rest), value in values.items():
        family.add_metric([model, ENGINE, *rest], value)
    return family
