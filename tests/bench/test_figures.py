"""From moments to figures."""

from __future__ import annotations

import pytest

from mlxd.bench.figures import Metric, ceiling, largest_gap, of_window, percentile, spreads
from mlxd.bench.load import Answer, Window


def answer(*deltas: float, sent: float = 0.0, tokens: int = 0) -> Answer:
    """An answer whose texts came at these moments."""
    return Answer(sent, deltas, deltas[-1] if deltas else sent, tokens or len(deltas), None)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (1.0, 100)]
)
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    """Nearest rank, whatever the order of the values."""
    assert percentile(reversed(range(1, 101)), share) == expected


def test_percentiles_of_few_values_are_the_nearest_of_them() -> None:
    """The p99 of three values is the largest; of none there is none."""
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_windows_percentiles_are_over_all_its_answers() -> None:
    """Gaps are within a stream, never between two; an answer without text has no first token."""
    window = Window(
        0.0, 10.0, [answer(1, 2, 4, tokens=30), answer(5, 9, tokens=9), answer(tokens=1)]
    )
    assert of_window(window) == {
        Metric.TOKENS_PER_SECOND: 4.0,
        Metric.TTFT_P50: 1,
        Metric.TTFT_P99: 5,
        Metric.GAP_P50: 2,
        Metric.GAP_P99: 4,
    }


def test_the_largest_gap_counts_from_the_moment_the_long_prompt_is_sent() -> None:
    """The gap that spans that moment counts whole; those before it do not."""
    streams = [answer(0, 50, 51, 60, 61), answer(0, 55.5, 57.0)]
    assert largest_gap(streams, since=50.5) == 55.5
    assert largest_gap(streams, since=55.5) == 9
    assert largest_gap(streams, since=60) == 1


def test_streams_that_had_all_ended_have_no_largest_gap() -> None:
    """Then the scenario has shown nothing."""
    with pytest.raises(ValueError, match="no stream was running"):
        largest_gap([answer(1, 2), answer(1, 3)], since=3)


def test_a_spread_is_the_median_with_the_extremes() -> None:
    """Each metric by itself; an even number of runs has the mean of the middle two."""
    runs = [{Metric.TTFT_P50: value, Metric.GAP_P50: -value} for value in (4.0, 1.0, 2.0, 9.0)]
    found = spreads(runs)
    spread = found[Metric.TTFT_P50]
    assert (spread.median, spread.low, spread.high) == (3.0, 1.0, 9.0)
    assert found[Metric.GAP_P50].low == -9.0


def test_the_ceiling_is_prefill_and_decode_one_after_the_other() -> None:
    """A third of a second for 90 in and a third for 48 out make 72 tokens a second."""
    found = ceiling(prompt_tokens=90, max_tokens=48, prefill_rate=270, decode_rate=144)
    assert found == pytest.approx(72.0)
