"""The command line. Serving imports nothing of the clients, and they nothing of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from mlxd import __version__
from mlxd.cli.client import Answer, Unreachable, call, parse_url
from mlxd.config import (
    CONFIG_VARIABLE,
    Address,
    ServerSettings,
    Settings,
    TcpAddress,
    cache_dir,
    load,
    parse_listen,
    read_token,
)
from mlxd.errors import ConfigError

EXIT_REFUSED = 1  # the configuration is wrong, or the daemon said no
EXIT_UNREACHABLE = 3  # 2 is a wrong command line
_QUICK = 10.0  # seconds; for calls that the daemon answers at once
#: The variable of the key admin.token_file, which also works without a configuration.
TOKEN_VARIABLE = "MLXD_ADMIN__TOKEN_FILE"

app = typer.Typer(
    name="mlxd",
    help="Serve language models with MLX. Without a command: serve.",
    epilog=(
        f"Exit status: 0 done, {EXIT_REFUSED} refused or wrong configuration, 2 wrong usage, "
        f"{EXIT_UNREACHABLE} no daemon there."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar=CONFIG_VARIABLE, help="The configuration file."),
]
Url = Annotated[
    str | None,
    typer.Option(
        help='The daemon: "http://host:port" or "unix:/path"; else where the file says that /admin '
        f"is. The token is read from the file's admin.token_file, or {TOKEN_VARIABLE}."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the daemon's answer as it is.")]
ModelName = Annotated[str | None, typer.Argument(help="A model's id; all models without.")]


def main() -> None:
    """Entry point of the `mlxd` command."""
    app()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    config: Config = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serve language models with MLX. Without a command: serve."""
    context.obj = config
    if version:
        typer.echo(f"mlxd {__version__}")
    elif context.invoked_subcommand is None:
        _serve(_file(context, config))


@app.command()
def serve(context: typer.Context, config: Config = None) -> None:
    """Run the daemon until SIGTERM."""
    _serve(_file(context, config))


@app.command()
def check(context: typer.Context, config: Config = None) -> None:
    """Read the configuration and print every problem it has."""
    path = _file(context, config)
    settings = _load(path)
    names = ", ".join(settings.models)
    typer.echo(f"{path}: good; {len(settings.models)} models: {names}")


@app.command()
def fetch(
    context: typer.Context,
    models: Annotated[list[str] | None, typer.Argument(help="Ids; all models without.")] = None,
    config: Config = None,
) -> None:
    """Fetch models into the cache, so that the daemon finds them there."""
    settings = _load(_file(context, config))
    unknown = sorted(set(models or ()) - set(settings.models))
    if unknown:
        _fail(f"no such model in the file: {', '.join(unknown)}")
    cache = cache_dir(settings.server)
    for model_id in models or settings.models:
        command = [sys.executable, "-m", "mlxd.models", settings.models[model_id].source]
        done = subprocess.run(
            [*command, "--cache", str(cache)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            _fail(f"{model_id} could not be fetched")
        typer.echo(f"{model_id}: {done.stdout.splitlines()[-1]}")


@app.command()
def status(
    context: typer.Context, config: Config = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Show the daemon's state and each model's."""
    answer = _ask(context, config, url, "GET", "/admin/status", timeout=_QUICK)
    _tell(answer, "status", as_json=as_json)


@app.command()
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
    body = {"model": model, "timeout": timeout, "wait": not no_wait}
    _tell(_ask(context, config, url, "POST", "/admin/drain", body), "drained", as_json=as_json)


@app.command()
def resume(
    context: typer.Context,
    model: ModelName = None,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Admit requests again."""
    body = {"model": model}
    answer = _ask(context, config, url, "POST", "/admin/resume", body, timeout=_QUICK)
    _tell(answer, "status", as_json=as_json)


@app.command()
def reload(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Let the daemon read its file again; if anything in it is wrong, nothing changes."""
    answer = _ask(context, config, url, "POST", "/admin/reload", {"dry_run": dry_run})
    _tell(answer, "plan", as_json=as_json)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure this daemon, and mlx-lm's server beside it."""
    from mlxd.bench import main as run_bench  # noqa: PLC0415 - heavy, and only for this

    raise typer.Exit(run_bench(context.args))


def _serve(path: Path) -> NoReturn:
    from mlxd import daemon  # noqa: PLC0415 - the clients need none of it

    try:
        raise typer.Exit(daemon.run(path))
    except ConfigError as error:
        _fail(str(error))


def _file(context: typer.Context, own: Path | None) -> Path:
    path = own or context.obj
    if not isinstance(path, Path):
        raise typer.BadParameter(f"say --config FILE, or set {CONFIG_VARIABLE}")
    return path


def _load(path: Path) -> Settings:
    try:
        return load(path, os.environ)
    except ConfigError as error:
        _fail(str(error))


def _ask(
    context: typer.Context,
    config: Path | None,
    url: str | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Answer:
    path_of_file = config or context.obj
    settings = None if path_of_file is None else _load(path_of_file)
    address = _address(url, settings)
    try:
        return call(address, method, path, body, timeout, _token(settings))
    except Unreachable as error:
        _fail(str(error), EXIT_UNREACHABLE)


def _address(url: str | None, settings: Settings | None) -> Address:
    if url is not None:
        try:
            return parse_url(url)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--url") from error
    listen = ServerSettings().listen
    if settings is not None:
        listen = settings.admin.listen or settings.server.listen
    address = parse_listen(listen)
    if isinstance(address, TcpAddress) and address.port == 0:
        raise typer.BadParameter("the file lets the system choose the port; say --url")
    return address


def _token(settings: Settings | None) -> str | None:
    if settings is not None:
        file = settings.admin.token_file
        return None if file is None else file.secret.text
    if TOKEN_VARIABLE not in os.environ:
        return None
    try:
        return read_token(Path(os.environ[TOKEN_VARIABLE])).text
    except ValueError as error:
        _fail(f"{TOKEN_VARIABLE}: {error}")


def _tell(answer: Answer, kind: Literal["status", "drained", "plan"], *, as_json: bool) -> None:
    """Print an answer; one that is a refusal ends the command with `EXIT_REFUSED`."""
    if as_json:
        _print_json(answer.body)
    elif "error" in answer.body:
        _fail(answer.message)
    else:
        _show(answer.body, kind)
    if answer.status >= 400:
        raise typer.Exit(EXIT_REFUSED)


def _show(body: dict[str, Any], kind: Literal["status", "drained", "plan"]) -> None:
    import msgspec  # noqa: PLC0415 - serving should not wait for what only people need
    from rich.console import Console  # noqa: PLC0415

    from mlxd.cli import show  # noqa: PLC0415

    show_kind = {"status": show.status, "drained": show.drained, "plan": show.plan}[kind]
    try:
        show_kind(body, Console())
    except msgspec.ValidationError:  # a daemon of another version
        _print_json(body)


def _print_json(body: dict[str, Any]) -> None:
    typer.echo(json.dumps(body, indent=2, ensure_ascii=False))


def _fail(message: str, status: int = EXIT_REFUSED) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status)
