"""From moments to figures: one run's, then the median of several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlxd.bench.load import Answer, Window


class Metric(StrEnum):
    """What a scenario measures. Times are seconds, factors and shares numbers."""

    TOKENS_PER_SECOND = "tokens_per_second"
    TTFT_P50 = "ttft_p50"
    TTFT_P99 = "ttft_p99"
    GAP_P50 = "gap_p50"
    GAP_P99 = "gap_p99"
    LARGEST_GAP = "largest_gap"
    LONG_TTFT = "long_ttft"
    QUIET_GAP_P50 = "quiet_gap_p50"
    QUIET_GAP_P99 = "quiet_gap_p99"
    BESIDE_GAP_P50 = "beside_gap_p50"
    BESIDE_GAP_P99 = "beside_gap_p99"
    GAP_FACTOR = "gap_factor"  # beside by quiet: p99 in prefill, p50 in decoding
    PREFILL_SHARE = "prefill_share"  # speed of the joining prompt by what it is alone
    COLD_TTFT = "cold_ttft"
    WARM_TTFT = "warm_ttft"
    WARM_SHARE = "warm_share"
    IDLE_TTFT = "idle_ttft"
    FAIR_TTFT = "fair_ttft"
    ARRIVAL_TTFT = "arrival_ttft"
    LEAVE_GAP = "leave_gap"
    LISTENING = "listening"
    READY = "ready"
    RESIDENT_BYTES = "resident_bytes"
    LIVEZ_P50 = "livez_p50"
    LIVEZ_P99 = "livez_p99"
    LIVEZ_MAX = "livez_max"


Figures = Mapping[Metric, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """One metric over several runs."""

    median: float
    low: float
    high: float


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed (nearest rank).

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def of_window(window: Window) -> Figures:
    """The figures of a closed loop: its throughput, and percentiles over all its answers.

    Raises:
        ValueError: no answer had two pieces of text.
    """
    ttfts = [answer.ttft for answer in window.answers if answer.ttft is not None]
    gaps = [gap for answer in window.answers for gap in answer.gaps]
    return {
        Metric.TOKENS_PER_SECOND: window.tokens_per_second,
        Metric.TTFT_P50: percentile(ttfts, 0.50),
        Metric.TTFT_P99: percentile(ttfts, 0.99),
        Metric.GAP_P50: percentile(gaps, 0.50),
        Metric.GAP_P99: percentile(gaps, 0.99),
    }


def largest_gap(answers: Sequence[Answer], since: float) -> float:
    """The longest wait between two deltas of a stream, of those that ended after a moment.

    Raises:
        ValueError: every stream had ended by then.
    """
    gaps = [
        late - early
        for answer in answers
        for early, late in zip(answer.deltas, answer.deltas[1:], strict=False)
        if late > since
    ]
    if not gaps:
        raise ValueError("no stream was running any more")
    return max(gaps)


def spreads(runs: Sequence[Figures]) -> dict[Metric, Spread]:
    """Median, lowest and highest of each metric that the runs have."""
    return {
        metric: _spread([figures[metric] for figures in runs])
        for metric in (runs[0] if runs else ())
    }


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ceiling(
    *, prompt_tokens: float, max_tokens: int, prefill_rate: float, decode_rate: float
) -> float:
    """Generated tokens per second if a machine does nothing but prefill and decode.

    Args:
        prompt_tokens: mean length of a prompt.
        prefill_rate: prompt tokens per second, while nothing decodes.
        decode_rate: generated tokens per second of all rows, while nothing prefills.
    """
    return max_tokens / (prompt_tokens / prefill_rate + max_tokens / decode_rate)
