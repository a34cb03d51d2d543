"""The results, and how they are shown: a table for people, Markdown, JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from mlxd.bench.facts import Ceiling, Machine
from mlxd.bench.figures import Metric, Spread, spreads
from mlxd.bench.servers import REFERENCE
from mlxd.wire import Blas

#: Medians of fewer runs are not for quoting.
ENOUGH_RUNS = 3


class Result(msgspec.Struct, frozen=True):
    """One scenario on one server: every run's figures, in SI units."""

    scenario: str
    about: str
    server: str
    runs: list[dict[Metric, float]]

    @property
    def spreads(self) -> dict[Metric, Spread]:
        """Median, lowest and highest of each metric."""
        return spreads(self.runs)


class Report(msgspec.Struct, frozen=True):
    """Everything that one call of the bench found."""

    machine: Machine
    model: str
    seed: int
    requests: int  # of each client, the first not counted
    blas: dict[str, Blas]  # really mapped, by server; absent where it cannot be told
    ceiling: Ceiling | None
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Column:
    """One metric as a column; with `ratio`, another one beside it compares with the reference."""

    heading: str
    metric: Metric
    spell: Callable[[float], str]
    ratio: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table before it is drawn."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def seconds(value: float) -> str:
    """A time for people."""
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.2f} s"


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _factor(value: float) -> str:
    return f"{value:.2f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


LOAD = (
    Column("tokens/s", Metric.TOKENS_PER_SECOND, _rate, ratio=True),
    Column("TTFT p50", Metric.TTFT_P50, seconds, ratio=True),
    Column("TTFT p99", Metric.TTFT_P99, seconds),
    Column("gap p50", Metric.GAP_P50, seconds),
    Column("gap p99", Metric.GAP_P99, seconds),
)
LONG_JOIN = (
    Column("largest gap of the streams", Metric.LARGEST_GAP, seconds, ratio=True),
    Column("TTFT of the long prompt", Metric.LONG_TTFT, seconds, ratio=True),
)
BESIDE = (
    Column("quiet gap p50", Metric.QUIET_GAP_P50, seconds),
    Column("p99", Metric.QUIET_GAP_P99, seconds),
    Column("gap beside p50", Metric.BESIDE_GAP_P50, seconds),
    Column("p99", Metric.BESIDE_GAP_P99, seconds),
    Column("times quiet", Metric.GAP_FACTOR, _factor, ratio=True),
    Column("prefill of lone", Metric.PREFILL_SHARE, _factor, ratio=True),
)
REPEATED = (
    Column("TTFT cold", Metric.COLD_TTFT, seconds, ratio=True),
    Column("TTFT warm", Metric.WARM_TTFT, seconds, ratio=True),
    Column("of cold", Metric.WARM_SHARE, _factor),
)
FLOOD = (
    Column("TTFT p50 idle", Metric.IDLE_TTFT, seconds),
    Column("in the flood", Metric.FAIR_TTFT, seconds),
    Column("in arrival order", Metric.ARRIVAL_TTFT, seconds),
    Column("between leaves p50", Metric.LEAVE_GAP, seconds),
)
STARTUP = (
    Column("listening after", Metric.LISTENING, seconds),
    Column("ready after", Metric.READY, seconds),
    Column("resident when ready", Metric.RESIDENT_BYTES, _mebibytes),
    Column("/livez p50 while loading", Metric.LIVEZ_P50, seconds),
    Column("/livez p99", Metric.LIVEZ_P99, seconds),
    Column("/livez max", Metric.LIVEZ_MAX, seconds),
)


TABLES = (LOAD, LONG_JOIN, BESIDE, REPEATED, FLOOD, STARTUP)


def sections(report: Report) -> list[Section]:
    """The tables that have rows."""
    made = [_section(report.results, columns) for columns in TABLES]
    return [section for section in made if section.rows]


def _section(results: Sequence[Result], columns: Sequence[Column]) -> Section:
    mine = [result for result in results if columns[0].metric in result.spreads]
    headings = ["scenario", "server"]
    for column in columns:
        headings += [column.heading, "ratio"] if column.ratio else [column.heading]
    return Section(headings, [_row(result, mine, columns) for result in mine])


def _row(result: Result, among: Sequence[Result], columns: Sequence[Column]) -> list[str]:
    cells = [result.scenario, result.server]
    for column in columns:
        spread = result.spreads[column.metric]
        cells.append(_cell(spread, column.spell, runs=len(result.runs)))
        if column.ratio:
            value = ratio(result, among, column.metric)
            cells.append("" if value is None else f"{value:.2f}")
    return cells


def _cell(spread: Spread, spell: Callable[[float], str], *, runs: int) -> str:
    if runs == 1:
        return f"{spell(spread.median)} (one run)"
    return f"{spell(spread.median)} ({spell(spread.low)} - {spell(spread.high)})"


def ratio(result: Result, among: Sequence[Result], metric: Metric) -> float | None:
    """This server's median by the reference's in the same scenario; None for the reference."""
    if result.server == REFERENCE:
        return None
    for other in among:
        if (other.scenario, other.server) == (result.scenario, REFERENCE):
            return result.spreads[metric].median / other.spreads[metric].median
    return None


def notes(report: Report) -> list[str]:
    """What the tables were measured on and with, one fact a line."""
    machine = report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    lines = [
        f"machine: {machine.cpu}, {machine.cores} cores, {machine.system}",
        f"versions: {versions}",
        f"model: {report.model}",
        *(
            f"BLAS of {server}: {blas.name}" + (f" ({blas.path})" if blas.path else "")
            for server, blas in report.blas.items()
        ),
    ]
    if report.ceiling is not None:
        lines.append(_spell_ceiling(report.ceiling))
    lines += dict.fromkeys(f"{result.scenario}: {result.about}" for result in report.results)
    runs = min((len(result.runs) for result in report.results), default=0)
    lines.append(
        "figures: median (lowest - highest) of interleaved runs; ratio: mlxd's median by "
        f"{REFERENCE}'s"
    )
    if runs < ENOUGH_RUNS:
        lines.append(f"fewer than {ENOUGH_RUNS} runs: these figures are not for quoting")
    return lines


def _spell_ceiling(ceiling: Ceiling) -> str:
    return (
        f"computed ceiling for mixed: {ceiling.tokens_per_second:.1f} tokens/s "
        f"(prefill alone {ceiling.prefill_rate:.0f} tokens/s, decode alone "
        f"{ceiling.decode_rate:.1f} tokens/s; {ceiling.prompt_tokens:.0f} tokens in, "
        f"{ceiling.max_tokens} out)"
    )


def show(report: Report, console: Console) -> None:
    """Tables for a terminal."""
    for section in sections(report):
        table = Table(box=None, header_style="bold")
        for index, heading in enumerate(section.headings):
            table.add_column(heading, justify="left" if index < 2 else "right")
        for row in section.rows:
            table.add_row(*(cell.replace(" (", "\n(") for cell in row))
        console.print(table)
        console.print()
    for line in notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The same for a README."""
    parts = [
        "\n".join(
            [
                _line(section.headings),
                _line(["---", "---", *["---:"] * (len(section.headings) - 2)]),
                *map(_line, section.rows),
            ]
        )
        for section in sections(report)
    ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in notes(report))]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_json(report: Report) -> str:
    """Everything, every single run included, with the spreads and ratios of the tables."""
    body = msgspec.to_builtins(report, str_keys=True)
    for built, result in zip(body["results"], report.results, strict=True):
        built["spreads"] = msgspec.to_builtins(result.spreads, str_keys=True)
        built["ratios"] = {
            metric.value: value
            for metric in result.spreads
            if (value := ratio(result, report.results, metric)) is not None
        }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
