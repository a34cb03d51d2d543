"""A client of the admin API for the command line: one call, one answer, no event loop."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mlxd.config import Address, TcpAddress, UnixAddress


class Unreachable(Exception):
    """No daemon answers there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the daemon said."""

    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        """The error's sentence, where it is an error."""
        error = self.body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        return str(message or f"the daemon answered {self.status}")


def parse_url(url: str) -> Address:
    """The address in `http://host:port` or `unix:/path`.

    Raises:
        ValueError: it is neither.
    """
    if url.startswith("unix:/"):
        return UnixAddress(url.removeprefix("unix:"))
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"}:
        raise ValueError(f'expected "http://host:port" or "unix:/path", got {url!r}')
    return TcpAddress(parts.hostname, 80 if parts.port is None else parts.port)


def call(
    address: Address,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout: float | None = None,
    token: str | None = None,
) -> Answer:
    """One request.

    Args:
        token: the admin's, where the daemon asks for one.
        timeout: seconds without a sign of life; None waits for as long as it takes.

    Raises:
        Unreachable: nothing listens there, or what does is no mlxd.
    """
    connection = _connection(address, timeout)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        reason = said or str(error) or type(error).__name__
        raise Unreachable(f"no daemon answers at {_spell(address)}: {reason}") from error
    finally:
        connection.close()
    return Answer(response.status, _object(content, address))


def _object(content: bytes, address: Address) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unreachable(f"what answers at {_spell(address)} is no mlxd")
    return body


def _spell(address: Address) -> str:
    match address:
        case UnixAddress(path):
            return f"unix:{path}"
        case TcpAddress(host, port):
            return f"{f'[{host}]' if ':' in host else host}:{port}"


def _connection(address: Address, timeout: float | None) -> http.client.HTTPConnection:
    match address:
        case UnixAddress(path):
            return _UnixConnection(path, timeout)
        case TcpAddress(host, port):
            return http.client.HTTPConnection(host, port, timeout=timeout)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
