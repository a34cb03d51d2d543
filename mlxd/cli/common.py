"""What the clients among the commands share: the daemon's address, its answers, exit statuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mlxd.cli.client import Answer, Unreachable, call, parse_url
from mlxd.config import (
    CONFIG_VARIABLE,
    Address,
    ServerSettings,
    Settings,
    TcpAddress,
    load,
    parse_listen,
    read_token,
)
from mlxd.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_REFUSED = 1  # the configuration is wrong, or the daemon said no
EXIT_UNREACHABLE = 3  # 2 is a wrong command line
QUICK = 10.0  # seconds; for calls that the daemon answers at once
#: The variable of the key admin.token_file, which also works without a configuration.
TOKEN_VARIABLE = "MLXD_ADMIN__TOKEN_FILE"

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

#: Prints an answer for people; raises `msgspec.ValidationError` for one of another version.
Show = Callable[[dict[str, Any], "Console"], None]


def file_of(context: typer.Context, own: Path | None) -> Path:
    """The configuration file, named here or before the command."""
    path = own or context.obj
    if not isinstance(path, Path):
        raise typer.BadParameter(f"say --config FILE, or set {CONFIG_VARIABLE}")
    return path


def read_settings(path: Path) -> Settings:
    """The file's settings; its problems end the command."""
    try:
        return load(path, os.environ)
    except ConfigError as error:
        fail(str(error))


class Asking:
    """One command's way to the daemon."""

    def __init__(self, context: typer.Context, config: Path | None, url: str | None) -> None:
        file = config or context.obj
        settings = None if file is None else read_settings(file)
        self._address = _address(url, settings)
        self._token = _token(settings)

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """One call; a daemon that is not there ends the command."""
        try:
            return call(self._address, method, path, body, timeout, self._token)
        except Unreachable as error:
            fail(str(error), EXIT_UNREACHABLE)


def tell(answer: Answer, show: Show, *, as_json: bool) -> None:
    """Print an answer; one that is a refusal ends the command with `EXIT_REFUSED`."""
    if as_json:
        print_json(answer.body)
    elif "error" in answer.body:
        fail(answer.message)
    else:
        _show(answer.body, show)
    if answer.status >= 400:
        raise typer.Exit(EXIT_REFUSED)


def print_json(body: dict[str, Any]) -> None:
    """For scripts."""
    typer.echo(json.dumps(body, indent=2, ensure_ascii=False))


def fail(message: str, status: int = EXIT_REFUSED) -> NoReturn:
    """End the command with a sentence."""
    typer.echo(message, err=True)
    raise typer.Exit(status)


def _show(body: dict[str, Any], show: Show) -> None:
    import msgspec  # noqa: PLC0415 - serving should not wait for what only people need
    from rich.console import Console  # noqa: PLC0415

    try:
        show(body, Console())
    except msgspec.ValidationError:  # a daemon of another version
        print_json(body)


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
        fail(f"{TOKEN_VARIABLE}: {error}")
