"""What the benchmark prints."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from mlxd.bench import report
from mlxd.bench.facts import Ceiling, Machine
from mlxd.bench.figures import Metric
from mlxd.bench.report import Report, Result
from mlxd.wire import Blas


def closed(server: str, *rates: float, scenario: str = "mixed") -> Result:
    """A closed loop's result with these throughputs; times follow from them."""
    runs = [
        {
            Metric.TOKENS_PER_SECOND: rate,
            Metric.TTFT_P50: 100 / rate,
            Metric.TTFT_P99: 200 / rate,
            Metric.GAP_P50: 1 / rate,
            Metric.GAP_P99: 2 / rate,
        }
        for rate in rates
    ]
    return Result(scenario, "16 clients", server, runs)


def full_report(*results: Result, ceiling: Ceiling | None = None) -> Report:
    """A report of a made-up machine."""
    return Report(
        machine=Machine("A CPU", 2, "Linux x86_64", {"mlxd": "1.0"}),
        model="starter:x",
        seed=1,
        requests=5,
        blas={"mlxd": Blas("openblas", "/lib/openblas.so")},
        ceiling=ceiling,
        results=list(results),
    )


BOTH = (closed("mlxd", 80, 100, 90), closed("mlx_lm.server", 50, 40, 60))


def test_markdown_shows_medians_extremes_and_ratios() -> None:
    """One row a server; the ratio is of the medians, and the reference has none."""
    lines = report.markdown(full_report(*BOTH)).splitlines()
    assert lines[0] == (
        "| scenario | server | tokens/s | ratio | TTFT p50 | ratio | TTFT p99 | gap p50 | gap p99 |"
    )
    assert lines[1] == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2].startswith(
        "| mixed | mlxd | 90.0 (80.0 - 100.0) | 1.80 | 1.11 s (1.00 s - 1.25 s) | 0.56 |"
    )
    assert lines[3].startswith(
        "| mixed | mlx_lm.server | 50.0 (40.0 - 60.0) |  | 2.00 s (1.67 s - 2.50 s) |  |"
    )


def test_scenarios_of_different_kinds_have_tables_of_their_own() -> None:
    """Each with its own columns, and none for what was not run."""
    long_join = Result("long-join", "a", "mlxd", [{Metric.LARGEST_GAP: 2, Metric.LONG_TTFT: 9}])
    tables = report.sections(full_report(*BOTH, long_join))
    assert [len(table.rows) for table in tables] == [2, 1]
    assert list(tables[1].rows[0]) == ["long-join", "mlxd", "2.00 s (one run)", "", *LONG_TTFT]


LONG_TTFT = ["9.00 s (one run)", ""]


def test_a_server_alone_has_no_ratio() -> None:
    """There is nothing to compare it with, also when another scenario has the reference."""
    alone = closed("mlxd", 80, 90, 100, scenario="greedy")
    assert report.ratio(alone, [alone, *BOTH], Metric.TOKENS_PER_SECOND) is None


def test_few_runs_are_marked_as_not_for_quoting() -> None:
    """Three of each are enough; the scenario with the fewest counts."""
    enough, few = full_report(*BOTH), full_report(*BOTH, closed("mlxd", 1, 2, scenario="greedy"))
    assert not any("not for quoting" in note for note in report.notes(enough))
    assert any("not for quoting" in note for note in report.notes(few))


def test_the_notes_name_machine_versions_blas_and_ceiling() -> None:
    """What is needed to judge the figures stands beside them."""
    ceiling = Ceiling(
        prompt_tokens=90.4,
        max_tokens=48,
        prefill_rate=270,
        decode_rate=144,
        tokens_per_second=72.0,
    )
    notes = report.notes(full_report(*BOTH, ceiling=ceiling))
    assert notes[:4] == [
        "machine: A CPU, 2 cores, Linux x86_64",
        "versions: mlxd 1.0",
        "model: starter:x",
        "BLAS of mlxd: openblas (/lib/openblas.so)",
    ]
    assert notes[4] == (
        "computed ceiling for mixed: 72.0 tokens/s (prefill alone 270 tokens/s, decode alone "
        "144.0 tokens/s; 90 tokens in, 48 out)"
    )
    assert notes[5] == "mixed: 16 clients"


def test_json_has_every_run_the_spreads_and_the_ratios() -> None:
    """A script finds the figures of the table and what they were made from."""
    body = json.loads(report.to_json(full_report(*BOTH)))
    mlxd, reference = body["results"]
    assert [run["tokens_per_second"] for run in mlxd["runs"]] == [80, 100, 90]
    assert mlxd["spreads"]["tokens_per_second"] == {"median": 90, "low": 80, "high": 100}
    assert mlxd["ratios"]["tokens_per_second"] == 1.8
    assert reference["ratios"] == {}
    assert msgspec.convert(body, Report) == full_report(*BOTH)


def test_a_terminal_gets_the_same_cells() -> None:
    """The table for people says what the Markdown says."""
    out = io.StringIO()
    report.show(full_report(*BOTH), Console(file=out, width=160))
    for expected in ("mlx_lm.server", "90.0", "80.0 - 100.0", "1.80", "machine: A CPU"):
        assert expected in out.getvalue()


@pytest.mark.parametrize(
    ("value", "spelled"),
    [(0.0, "0 ms"), (0.00151, "1.51 ms"), (0.0855, "85.5 ms"), (0.9994, "999 ms"), (1.0, "1.00 s")],
)
def test_times_are_spelled_with_three_digits(value: float, spelled: str) -> None:
    """Milliseconds below a second."""
    assert report.seconds(value) == spelled
