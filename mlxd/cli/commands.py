"""The command line. Serving imports nothing of the clients, and they nothing of the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mlxd import __version__
from mlxd.cli import operate
from mlxd.cli.common import (
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    Config,
    fail,
    file_of,
    read_settings,
)
from mlxd.config import cache_dir
from mlxd.errors import ConfigError

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

operate.register(app)


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
        _serve(file_of(context, config))


@app.command()
def serve(context: typer.Context, config: Config = None) -> None:
    """Run the daemon until SIGTERM."""
    _serve(file_of(context, config))


@app.command()
def check(context: typer.Context, config: Config = None) -> None:
    """Read the configuration and print every problem it has."""
    path = file_of(context, config)
    settings = read_settings(path)
    names = ", ".join(settings.models)
    typer.echo(f"{path}: good; {len(settings.models)} models: {names}")


@app.command()
def fetch(
    context: typer.Context,
    models: Annotated[list[str] | None, typer.Argument(help="Ids; all models without.")] = None,
    config: Config = None,
) -> None:
    """Fetch models into the cache, so that the daemon finds them there."""
    settings = read_settings(file_of(context, config))
    unknown = sorted(set(models or ()) - set(settings.models))
    if unknown:
        fail(f"no such model in the file: {', '.join(unknown)}")
    cache = cache_dir(settings.server)
    for model_id in models or settings.models:
        command = [sys.executable, "-m", "mlxd.models", settings.models[model_id].source]
        done = subprocess.run(
            [*command, "--cache", str(cache)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            fail(f"{model_id} could not be fetched")
        typer.echo(f"{model_id}: {done.stdout.splitlines()[-1]}")


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
        fail(str(error))
