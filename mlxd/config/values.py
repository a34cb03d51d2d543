"""Texts of the configuration that stand for something else: durations, sizes, addresses, names."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

#: Key of the validation context: the configuration file's folder. It is there exactly when the
#: values were written by a person, in a file or a variable.
FOLDER = "folder"

# Linux allows 108 bytes and macOS 104, the final zero included.
_MAX_SOCKET_PATH_BYTES = 100

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_BYTES = {"B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?i?B)")
_MODEL_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_ENDPOINT = re.compile(r"https?://[^\s/]+(?:/\S*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")


def seconds(text: str) -> float:
    """Seconds of a duration such as "30s", "5m", "1h30m" or "250ms".

    Raises:
        ValueError: it is none.
    """
    if _DURATION.fullmatch(text) is None:
        raise ValueError('expected a duration such as "30s", "5m" or "250ms"')
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def size(text: str) -> int:
    """Bytes of a size such as "2GiB" or "500MB".

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _BYTES:
        raise ValueError('expected a size such as "2GiB", "500MB" or "4096B"')
    return int(float(match[1]) * _BYTES[match[2]])


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`host:port`; port 0 lets the system choose."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """`unix:/path`."""

    path: str


Address = TcpAddress | UnixAddress


def parse_listen(text: str) -> Address:
    """The address that `server.listen` names.

    Raises:
        ValueError: it names none.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError('expected "unix:/path"')
        if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"expected a socket path of at most {_MAX_SOCKET_PATH_BYTES} bytes")
        return UnixAddress(path)
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError('expected "host:port" or "unix:/path"')
    return TcpAddress(host, int(port))


def is_local(address: Address) -> bool:
    """Whether only this machine can reach it: a Unix socket, or loopback."""
    if isinstance(address, UnixAddress) or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def resolve(path: str, info: ValidationInfo) -> str:
    """The path, `~` expanded, made absolute from the configuration file's folder.

    Raises:
        ValueError: `~` cannot be expanded.
    """
    folder = (info.context or {}).get(FOLDER)
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"expected a path; {error}") from error
    return str(expanded if folder is None else Path(folder, expanded).absolute())


def _duration(value: object, info: ValidationInfo) -> object:
    # From code a duration is seconds; a person writes the unit.
    if isinstance(value, str):
        return seconds(value)
    if info.context:
        raise ValueError('expected a duration such as "30s", "5m" or "250ms"')
    return value


def _optional_duration(value: object, info: ValidationInfo) -> object:
    if value == "off":
        return None
    try:
        return _duration(value, info)
    except ValueError as error:
        raise ValueError(f'{error}, or "off"') from None


def _size(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return size(value)
    if info.context:
        raise ValueError('expected a size such as "2GiB" or "500MB"')
    return value


def _size_or_auto(value: object, info: ValidationInfo) -> object:
    return None if value == "auto" or value is None else _size(value, info)


def _listen(value: str, info: ValidationInfo) -> str:
    address = parse_listen(value)
    if isinstance(address, UnixAddress):
        value = f"unix:{resolve(address.path, info)}"
        parse_listen(value)  # the absolute path may be too long
    return value


def _optional_listen(value: str | None, info: ValidationInfo) -> str | None:
    return None if value is None else _listen(value, info)


def _optional_path(value: str | None, info: ValidationInfo) -> str | None:
    return None if value is None else resolve(value, info)


def _endpoint(value: str | None) -> str | None:
    if value is not None and not _is_endpoint(value):
        raise ValueError("expected an http or https URL such as 'http://127.0.0.1:4318/v1/traces'")
    return value


def _is_endpoint(value: str) -> bool:
    try:
        urlsplit(value)
    except ValueError:  # brackets that are no address
        return False
    return _ENDPOINT.fullmatch(value) is not None


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if pattern.fullmatch(value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


Duration = Annotated[float, BeforeValidator(_duration)]
OptionalDuration = Annotated[float | None, BeforeValidator(_optional_duration)]
Size = Annotated[int, BeforeValidator(_size)]
SizeOrAuto = Annotated[int | None, BeforeValidator(_size_or_auto)]
Listen = Annotated[str, AfterValidator(_listen)]
OptionalPath = Annotated[Annotated[str, Field(min_length=1)] | None, AfterValidator(_optional_path)]
OptionalEndpoint = Annotated[str | None, AfterValidator(_endpoint)]
OptionalListen = Annotated[str | None, AfterValidator(_optional_listen)]
ModelId = Annotated[
    str, _matching(_MODEL_ID, "a model id of a-z, 0-9, '.', '_' and '-', not starting with a sign")
]
Alias = Annotated[str, _matching(_ALIAS, "a model name without spaces, such as 'gpt-4o'")]
Host = Annotated[str, _matching(_HOST, "a host name or address without a port")]
Origin = Annotated[str, _matching(_ORIGIN, "an origin such as 'https://chat.example.org'")]
