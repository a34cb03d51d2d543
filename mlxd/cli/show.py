"""The admin API's answers, for people. Each raises `msgspec.ValidationError` for another's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from mlxd.operations import DrainReport, LaneCounts, RequestStatus
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


class _Requests(msgspec.Struct):
    requests: list[RequestStatus]


_COLORS = {"ready": "green", "failed": "red", "draining": "yellow"}


def status(body: dict[str, Any], out: Console) -> None:
    """One line for the daemon, one row for each model, and why those that failed did."""
    out.print(_status(body), highlight=False)


def model(body: dict[str, Any], out: Console) -> None:
    """One model's state, and why it failed."""
    one = msgspec.convert(body, _Model)
    reason = "" if one.reason is None else f": {escape(one.reason)}"
    out.print(f"{one.id}: {_colored(one.state)}{reason}", highlight=False)


def requests(body: dict[str, Any], out: Console) -> None:
    """One row for each request."""
    out.print(_requests(body), highlight=False)


def cancelled(body: dict[str, Any], out: Console) -> None:
    """How many were ended."""
    out.print(f"{body.get('cancelled')} ended", highlight=False)


def overview(status_body: dict[str, Any], requests_body: dict[str, Any]) -> RenderableType:
    """What `status` and `requests` show, as one picture."""
    return Group(_status(status_body), "", _requests(requests_body))


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

    def drains_first(model: str) -> str:
        return " (drains first: no room for both)" if model in changes.drain_first else ""

    lines = [
        *(f"add {model}" for model in changes.add),
        *(f"remove {model}" for model in changes.remove),
        *(
            f"replace {model}{drains_first(model)}: {', '.join(keys)}"
            for model, keys in changes.replace.items()
        ),
        *(f"retune {model}: {', '.join(keys)}" for model, keys in changes.retune.items()),
        *(f"undo {model}: {', '.join(keys)}" for model, keys in changes.undo.items()),
        *(f"change server: {key}" for key in changes.server),
        *(f"change admin: {key}" for key in changes.admin),
        *(f"change metrics: {key}" for key in changes.metrics),
        *(f"change log: {key}" for key in changes.log),
        *(f"change memory: {key}" for key in changes.memory),
    ]
    for line in lines or ["nothing changes"]:
        out.print(line, highlight=False, markup=False)


def _status(body: dict[str, Any]) -> RenderableType:
    daemon = msgspec.convert(body, _Daemon)
    reloading = ", reloading" if daemon.reloading else ""
    first = (
        f"mlxd {daemon.version}: {_colored(daemon.state)}{reloading}, config {daemon.config_etag}"
    )
    headings = ("MODEL", "STATE", "RUNNING", "WAITING", "MEMORY", "ENGINE", "RESTARTS")
    table = _table(headings, [_row(model) for model in daemon.models])
    failed = [
        f"{model.id}: {escape(model.reason)}" for model in daemon.models if model.reason is not None
    ]
    return Group(first, table, *failed)


def _requests(body: dict[str, Any]) -> RenderableType:
    listed = msgspec.convert(body, _Requests).requests
    headings = ("REQUEST", "MODEL", "CALLER", "LANE", "STATE", "SECONDS", "PROMPT", "GENERATED")
    rows = [
        [
            escape(request.id),
            request.model,
            escape(request.caller or ""),
            f"{request.lane}, {request.reason}",
            request.state,
            f"{request.seconds:.1f}",
            str(request.prompt_tokens),
            str(request.generated_tokens),
        ]
        for request in listed
    ]
    return _table(headings, rows) if rows else "no requests"


def _table(headings: Iterable[str], rows: Iterable[list[str]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    return table


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
