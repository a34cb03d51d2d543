"""Binding the listening socket, before anything else costs time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd.config import Address, TcpAddress, UnixAddress

BACKLOG = 1024


@contextmanager
def bound(address: Address) -> Iterator[socket.socket]:
    """A listening socket on this address; a Unix socket's file goes with it.

    Raises:
        OSError: the address is taken or cannot be had.
    """
    match address:
        case TcpAddress(host, port):
            with _tcp(host, port) as listener:
                yield listener
        case UnixAddress(text):
            path = Path(text)
            with _unix(path) as listener:
                mine = path.stat()
                try:
                    yield listener
                finally:
                    _unlink_own(path, mine)


def describe(listener: socket.socket) -> str:
    """The address as a person would write it; a port 0 has become a real one."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        # For a port whose last connections still linger; a listener that lives is not shared.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket that a daemon left behind; raises OSError where one still listens."""
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, "exists and is no socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, "another process listens there", str(path))


def _unlink_own(path: Path, mine: os.stat_result) -> None:
    # Another daemon may have taken the path since.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), mine):
            path.unlink()
