"""The commands that act on a running daemon: thin clients of its admin API.

What draws tables is imported by the commands that draw one: serving must not wait for it.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mlxd.cli.common import QUICK, AsJson, Asking, Config, Url, fail, tell

ModelName = Annotated[str | None, typer.Argument(help="A model's id; all models without.")]
OneModel = Annotated[str, typer.Argument(help="A model's id.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (status, drain, resume, reload, load, unload, restart, requests, cancel, top):
        app.command()(command)


def status(
    context: typer.Context, config: Config = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Show the daemon's state and each model's."""
    from mlxd.cli import show  # noqa: PLC0415

    answer = Asking(context, config, url).ask("GET", "/admin/status", timeout=QUICK)
    tell(answer, show.status, as_json=as_json)


def drain(
    context: typer.Context,
    model: ModelName = None,
    timeout: Annotated[
        str | None, typer.Option(help='How long running requests may take, such as "30s".')
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once.")] = False,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Stop admitting requests and let the running ones finish; `resume` undoes it."""
    from mlxd.cli import show  # noqa: PLC0415

    body = {"model": model, "timeout": timeout, "wait": not no_wait}
    answer = Asking(context, config, url).ask("POST", "/admin/drain", body)
    tell(answer, show.drained, as_json=as_json)


def resume(
    context: typer.Context,
    model: ModelName = None,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Admit requests again."""
    from mlxd.cli import show  # noqa: PLC0415

    asking = Asking(context, config, url)
    answer = asking.ask("POST", "/admin/resume", {"model": model}, timeout=QUICK)
    tell(answer, show.status, as_json=as_json)


def reload(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Let the daemon read its file again; if anything in it is wrong, nothing changes."""
    from mlxd.cli import show  # noqa: PLC0415

    answer = Asking(context, config, url).ask("POST", "/admin/reload", {"dry_run": dry_run})
    tell(answer, show.plan, as_json=as_json)


def load(
    context: typer.Context,
    model: OneModel,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Start a model that was unloaded or has failed; returns when it serves, or says why not."""
    _change(Asking(context, config, url), model, "load", as_json=as_json)


def unload(
    context: typer.Context,
    model: OneModel,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Let a model finish what it has, up to drain_timeout, and give its memory back."""
    _change(Asking(context, config, url), model, "unload", as_json=as_json)


def restart(
    context: typer.Context,
    model: OneModel,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a model a new engine; the old one finishes what it has."""
    _change(Asking(context, config, url), model, "restart", as_json=as_json)


def requests(
    context: typer.Context, config: Config = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Show which requests run and which wait."""
    from mlxd.cli import show  # noqa: PLC0415

    answer = Asking(context, config, url).ask("GET", "/admin/requests", timeout=QUICK)
    tell(answer, show.requests, as_json=as_json)


def cancel(
    context: typer.Context,
    request: Annotated[str, typer.Argument(help="Its x-request-id.")],
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """End one request."""
    from mlxd.cli import show  # noqa: PLC0415

    asking = Asking(context, config, url)
    answer = asking.ask("DELETE", f"/admin/requests/{quote(request, safe='')}", timeout=QUICK)
    tell(answer, show.cancelled, as_json=as_json)


def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Looks; for ever without.")] = None,
    config: Config = None,
    url: Url = None,
) -> None:
    """Watch models and requests until Ctrl-C."""
    from rich.live import Live  # noqa: PLC0415

    from mlxd.cli import show  # noqa: PLC0415

    asking = Asking(context, config, url)

    def look() -> tuple[dict[str, Any], dict[str, Any]]:
        paths = ("/admin/status", "/admin/requests")
        answers = [asking.ask("GET", path, timeout=QUICK) for path in paths]
        for answer in answers:
            if answer.status >= 400:
                fail(answer.message)
        return answers[0].body, answers[1].body

    looks = 1
    with Live(show.overview(*look()), auto_refresh=False) as live:
        while count is None or looks < count:
            time.sleep(interval)
            live.update(show.overview(*look()), refresh=True)
            looks += 1


def _change(asking: Asking, model: str, what: str, *, as_json: bool) -> None:
    from mlxd.cli import show  # noqa: PLC0415

    answer = asking.ask("POST", f"/admin/models/{quote(model)}/{what}")
    tell(answer, show.model, as_json=as_json)
