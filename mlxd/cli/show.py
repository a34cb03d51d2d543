"""The admin API's answers, for people. Each raises `msgspec.ValidationError` for another's."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlxd.operations import DrainReport, LaneCounts
from mlxd.plan import Plan
from mlxd.wire import Blas


# Of `operations.DaemonStatus` only what the table shows, so that it can show other versions' too.
class _Phase(msgspec.Struct):
    name: str


class _Engine(msgspec.Struct):
    device: str
    blas: Blas


class _Model(msgspec.Struct):
    id: str
    aliases: list[str]
    state: str
    reason: str | None
    width: int
    running: LaneCounts
    waiting: LaneCounts
    phase: _Phase | None
    engine: _Engine | None
    kv_bytes: int
    weight_bytes: int
    restarts: int


class _Daemon(msgspec.Struct):
    state: str
    version: str
    config_etag: str
    reloading: bool
    models: list[_Model]


_COLORS = {"ready": "green", "failed": "red", "draining": "yellow"}


def status(body: dict[str, Any], out: Console) -> None:
    """One line for the daemon, one row for each model, and why those that failed did."""
    daemon = msgspec.convert(body, _Daemon)
    reloading = ", reloading" if daemon.reloading else ""
    out.print(
        f"mlxd {daemon.version}: {_colored(daemon.state)}{reloading}, config {daemon.config_etag}",
        highlight=False,
    )
    table = Table(box=None, header_style="bold")
    for heading in ("MODEL", "STATE", "RUNNING", "WAITING", "MEMORY", "ENGINE", "RESTARTS"):
        table.add_column(heading)
    for model in daemon.models:
        table.add_row(*_row(model))
    out.print(table)
    for model in daemon.models:
        if model.reason is not None:
            out.print(f"{model.id}: {escape(model.reason)}", highlight=False)


def drained(body: dict[str, Any], out: Console) -> None:
    """The state, and what each model still has to finish."""
    report = msgspec.convert(body, DrainReport)
    out.print(_colored(report.state))
    for model, live in report.models.items():
        if live.running or live.waiting:
            out.print(f"{model}: {live.running} running, {live.waiting} waiting", highlight=False)


def plan(body: dict[str, Any], out: Console) -> None:
    """One line for everything that changes, with the keys that are the cause."""
    changes = msgspec.convert(body["plan"], Plan)
    lines = [
        *(f"add {model}" for model in changes.add),
        *(f"remove {model}" for model in changes.remove),
        *(f"replace {model}: {', '.join(keys)}" for model, keys in changes.replace.items()),
        *(f"retune {model}: {', '.join(keys)}" for model, keys in changes.retune.items()),
        *(f"change server: {key}" for key in changes.server),
        *(f"change admin: {key}" for key in changes.admin),
        *(f"change metrics: {key}" for key in changes.metrics),
        *(f"change log: {key}" for key in changes.log),
    ]
    for line in lines or ["nothing changes"]:
        out.print(line, highlight=False, markup=False)


def _row(model: _Model) -> list[str]:
    engine, phase = model.engine, model.phase
    return [
        ", ".join([model.id, *model.aliases]),
        _colored(model.state) + ("" if phase is None else f", {phase.name}"),
        f"{_lanes(model.running)} of {model.width}",
        _lanes(model.waiting),
        f"{_mebibytes(model.weight_bytes)} + {_mebibytes(model.kv_bytes)} KV",
        "" if engine is None else f"{engine.device}, {engine.blas.name}",
        str(model.restarts),
    ]


def _colored(state: str) -> str:
    color = _COLORS.get(state)
    return state if color is None else f"[{color}]{state}[/]"


def _lanes(counts: LaneCounts) -> str:
    return f"{counts.batch} + {counts.serial} serial" if counts.serial else str(counts.batch)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
