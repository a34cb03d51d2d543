"""The counters and histograms of one model, each moved by the fact it counts."""

from __future__ import annotations

from prometheus_client import Histogram

from mlxd.metrics import NO_LANE, Metrics
from mlxd.metrics.vllm import Life
from mlxd.policy import REASON_NONE, REASON_WIDTH, TRAITS
from mlxd.wire import Lane

#: Of requests that had a lane.
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "error", "drained")
REJECTED = "rejected"
#: Why a model without any batchable cache runs serially; see `Capabilities.serial_only`.
REASON_CACHE = "cache"


class ModelMetrics:
    """One model's counters and histograms.

    All children are made here, so that series start at 0, and kept, so that a
    late fact about a model that is gone cannot bring a series back.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._requests = {
            (lane, outcome): metrics.requests.labels(model, lane, outcome)
            for lane in (*Lane, NO_LANE)
            for outcome in (OUTCOMES if lane != NO_LANE else (REJECTED,))
        }
        decisions = [(str(Lane.BATCH), REASON_NONE)]
        decisions += [(Lane.SERIAL, reason) for reason in (*TRAITS, REASON_WIDTH, REASON_CACHE)]
        decisions += [(NO_LANE, trait) for trait in TRAITS]
        self._decisions = {
            (lane, reason): metrics.lane_decisions.labels(model, lane, reason)
            for lane, reason in decisions
        }
        self._prompt = {
            source: metrics.prompt_tokens.labels(model, source) for source in ("computed", "cached")
        }
        self._prefix_query = metrics.prefix_cache_query_tokens.labels(model)
        self._prefix_hit = metrics.prefix_cache_hit_tokens.labels(model)
        self._discarded = metrics.discarded_tokens.labels(model)
        self._replays = metrics.replays.labels(model)
        self._restarts = metrics.engine_restarts.labels(model)
        self._preemptions = metrics.preemptions.labels(model)
        self._vllm = metrics.vllm.of(model)
        self._step_seconds = metrics.step_seconds.labels(model)
        self._step_rows = metrics.step_rows.labels(model)

        def by_lane(metric: Histogram) -> dict[Lane, Histogram]:
            return {lane: metric.labels(model, lane) for lane in Lane}

        self._generated = {lane: metrics.generated_tokens.labels(model, lane) for lane in Lane}
        self._first_token = by_lane(metrics.time_to_first_token)
        self._inter_token = by_lane(metrics.inter_token)
        self._request_seconds = by_lane(metrics.request_seconds)
        self._queue_seconds = by_lane(metrics.queue_seconds)
        self._prefill_seconds = by_lane(metrics.prefill_seconds)

    def decided(self, lane: str, reason: str) -> None:
        """The policy chose a lane, or `NO_LANE` where it rejected."""
        self._decisions[lane, reason].inc()

    def rejected(self) -> None:
        """A request was refused before it was admitted, whatever lane it would have had."""
        self._requests[NO_LANE, REJECTED].inc()

    def ended(self, lane: Lane, outcome: str, life: Life) -> None:
        """An admitted request ended."""
        self._requests[lane, outcome].inc()
        self._request_seconds[lane].observe(life.seconds)
        self._vllm.ended(life)

    def started(self, lane: Lane, queued: float) -> None:
        """A request got its row after this many seconds."""
        self._queue_seconds[lane].observe(queued)

    def looked_up(self, tokens: int, found: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self._prefix_query.inc(tokens)
        self._prefix_hit.inc(found)

    def first_token(self, lane: Lane, seconds: float) -> None:
        """A request's first token came this long after its admission."""
        self._first_token[lane].observe(seconds)
        self._vllm.first_token(seconds)

    def next_token(self, lane: Lane, seconds: float) -> None:
        """Another token came this long after the one before."""
        self._inter_token[lane].observe(seconds)
        self._vllm.next_token(seconds)

    def generated(self, lane: Lane, tokens: int) -> None:
        """Tokens that count as usage."""
        self._generated[lane].inc(tokens)

    def discarded(self, tokens: int) -> None:
        """Tokens computed past an end."""
        self._discarded.inc(tokens)

    def replayed(self) -> None:
        """A request runs again on a new engine."""
        self._replays.inc()

    def preempted(self) -> None:
        """A row gave up its state, to be computed again."""
        self._preemptions.inc()

    def restarted(self) -> None:
        """An engine that died is followed by another."""
        self._restarts.inc()

    def prefilled(self, lane: Lane, *, computed: int, cached: int, seconds: float | None) -> None:
        """What the engine says of a request's prompt at its end.

        Args:
            seconds: that the prefill took; None where it was not finished.
        """
        self._prompt["computed"].inc(computed)
        self._prompt["cached"].inc(cached)
        if seconds is not None:
            self._prefill_seconds[lane].observe(seconds)

    def stepped(self, seconds: float, rows: int) -> None:
        """One iteration of the engine."""
        self._step_seconds.observe(seconds)
        self._step_rows.observe(rows)
