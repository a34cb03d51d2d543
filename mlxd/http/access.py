"""Which Host and Origin may speak to the daemon.

A page in somebody's browser can reach a listener on loopback: under a name that
it re-points there (Host), or by plain cross-origin requests (Origin).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from mlxd.config import ServerSettings
from mlxd.errors import Forbidden
from mlxd.http.context import CONTEXT

_EXPOSED = "x-request-id, x-mlxd-lane, x-mlxd-lane-reason"
_METHODS = "GET, POST, PATCH, DELETE"
_PREFLIGHT_SECONDS = "600"


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts and origins; answer the preflights of accepted origins."""
    server = request.app[CONTEXT].server()
    _check_host(request, server)
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or _is_same_origin(origin, request):
        return await handler(request)
    if origin not in server.origins:
        raise Forbidden(f"origin {origin[:200]!r} is not accepted", code="origin_not_allowed")
    if request.method == hdrs.METH_OPTIONS:
        return _preflight(request)
    return await handler(request)


async def add_cors(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: let pages of accepted origins read the answer."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and origin in request.app[CONTEXT].server().origins:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)


def _preflight(request: web.Request) -> web.Response:
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "authorization, content-type")
    return web.Response(
        status=204,
        headers={
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
            hdrs.ACCESS_CONTROL_MAX_AGE: _PREFLIGHT_SECONDS,
        },
    )


def _check_host(request: web.Request, server: ServerSettings) -> None:
    local = None if request.transport is None else request.transport.get_extra_info("sockname")
    sent = request.headers.get(hdrs.HOST)
    # No browser reaches a Unix socket, and none leaves Host out.
    if sent is None or not isinstance(local, tuple):
        return
    name = _host_name(sent)
    accepted = {host.lower() for host in server.hosts}
    accepted |= {_host_name(server.listen), str(local[0])}
    if name not in accepted and sent.lower() not in accepted and not _is_loopback(name):
        raise Forbidden(f"host {sent[:200]!r} is not accepted", code="host_not_allowed")


def _host_name(authority: str) -> str:
    """Lower-case name or address of `name:port`; empty where it is malformed."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_same_origin(origin: str, request: web.Request) -> bool:
    sent = request.headers.get(hdrs.HOST)
    return sent is not None and origin.lower() in {
        f"http://{sent}".lower(),
        f"https://{sent}".lower(),
    }
