"""Who may call what: API keys for the models, the admin's token for `/admin`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from aiohttp import hdrs

from mlxd.config import KeyRing, Settings, TokenFile, UnixAddress, parse_listen
from mlxd.errors import Forbidden, Unauthorized
from mlxd.serving import ANYBODY, Caller

_PROBES = frozenset({"/livez", "/readyz", "/health"})
# A browser cannot send the token with a page that is typed in. This one tells nothing: what it
# shows it asks for, with the token that it is given.
_PAGE = "/admin/ui"
# Whatever a router or a proxy may take for it.
_ADMIN = re.compile(r"/+admin(?:/|$)", re.IGNORECASE)
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_ANTHROPIC_HEADER = "x-api-key"


class Scope(Enum):
    """What a path belongs to."""

    PROBE = auto()
    METRICS = auto()
    ADMIN = auto()
    API = auto()  # everything else, paths that there are not included


@dataclass(frozen=True, slots=True)
class Access:
    """What one listener asks of its callers; without keys and token, nothing."""

    keys: KeyRing | None = None
    token: TokenFile | None = None
    metrics_open: bool = False

    @classmethod
    def public(cls, settings: Settings) -> Access:
        """Of the public listener."""
        keys, token = settings.server.api_keys_file, settings.admin.token_file
        return cls(keys, token, settings.metrics.open)

    @classmethod
    def admin(cls, settings: Settings) -> Access:
        """Of a separate admin listener."""
        listen = settings.admin.listen
        is_socket = listen is not None and isinstance(parse_listen(listen), UnixAddress)
        if is_socket and settings.admin.token_file is None:  # the socket's mode is the guard
            return cls()
        return cls.public(settings)


def scope_of(path: str) -> Scope:
    """What this path, decoded, belongs to; what is not known to be open is not."""
    if path in _PROBES or path == _PAGE:
        return Scope.PROBE
    if path == "/metrics":
        return Scope.METRICS
    return Scope.ADMIN if _ADMIN.match(path) else Scope.API


def offered(headers: Mapping[str, str]) -> str | None:
    """The key or token that a request carries, as OpenAI's or as Anthropic's clients send it."""
    bearer = _BEARER.fullmatch(headers.get(hdrs.AUTHORIZATION, ""))
    return bearer[1] if bearer is not None else headers.get(_ANTHROPIC_HEADER) or None


def identify(access: Access, scope: Scope, secret: str | None) -> Caller:
    """The caller, where it may do this.

    Args:
        secret: what it offers.

    Raises:
        Unauthorized: a key or token is needed, and this is none.
        Forbidden: it is a key where the token is needed.
    """
    match scope:
        case Scope.PROBE:
            return ANYBODY
        case Scope.ADMIN if access.token is not None:
            return _as_admin(access, access.token, secret)
        case Scope.METRICS if access.metrics_open or _matches(access.token, secret):
            return ANYBODY
    return ANYBODY if access.keys is None else _by_key(access.keys, secret)


def _matches(token: TokenFile | None, secret: str | None) -> bool:
    return token is not None and secret is not None and token.secret.matches(secret)


def _as_admin(access: Access, token: TokenFile, secret: str | None) -> Caller:
    if _matches(token, secret):
        return ANYBODY
    if secret is not None and access.keys is not None and access.keys.find(secret) is not None:
        raise Forbidden("an API key opens no /admin; this needs the admin's token")
    raise Unauthorized("this needs the admin's token: Authorization: Bearer …")


def _by_key(keys: KeyRing, secret: str | None) -> Caller:
    if secret is None:
        raise Unauthorized("this needs an API key: Authorization: Bearer … or x-api-key: …")
    key = keys.find(secret)
    if key is None:
        raise Unauthorized("the API key is not known")
    return Caller(key.name, key.weight, key.max_priority)
