"""The public application: routes, middlewares, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry

from mlxd.config import ServerSettings
from mlxd.http import anthropic, openai, openapi, probes, responses, tokens
from mlxd.http.access import add_cors, guard
from mlxd.http.auth import Access
from mlxd.http.context import CONTEXT, Context
from mlxd.http.middleware import authenticate, observe, stamp_request_id
from mlxd.http.responses_store import ResponseStore
from mlxd.serving import Directory
from mlxd.traces import Tell


def make_app(
    directory: Directory,
    *,
    server: Callable[[], ServerSettings],
    access: Callable[[], Access] = Access,
    tell: Tell | None = None,
    registry: CollectorRegistry,
    extra_routes: Sequence[web.AbstractRouteDef] = (),
) -> web.Application:
    """The whole public application; keeps no state, so that several may exist.

    Args:
        server: settings of the moment, read for each request.
        access: what is asked of callers at the moment, read for each request.
        tell: told of every request for traces, if anybody wants them.
        registry: what `/metrics` shows.
        extra_routes: mounted beside the public ones, behind the same checks.
    """
    app = _guarded_app(Context(directory, server, access, tell))
    app[responses.STORE] = ResponseStore(lambda: server().response_store)
    app.add_routes([*probes.routes(registry), *openai.ROUTES, *responses.ROUTES])
    app.add_routes([*anthropic.ROUTES, *tokens.ROUTES, *openapi.ROUTES, *extra_routes])
    return app


def make_admin_app(
    directory: Directory,
    *,
    server: Callable[[], ServerSettings],
    access: Callable[[], Access],
    registry: CollectorRegistry,
    routes: Sequence[web.AbstractRouteDef],
) -> web.Application:
    """What a separate admin listener serves: the admin's routes, probes and `/metrics`."""
    app = _guarded_app(Context(directory, server, access))
    app.add_routes([*probes.routes(registry), *routes])
    return app


def _guarded_app(context: Context) -> web.Application:
    # The body's limit can change with a reload: `read_object` enforces it, not aiohttp.
    app = web.Application(middlewares=[observe, guard, authenticate], client_max_size=0)
    app[CONTEXT] = context
    app.on_response_prepare.append(stamp_request_id)
    app.on_response_prepare.append(add_cors)
    return app


def make_runner(
    app: web.Application, *, shutdown_timeout: float, receive_timeout: float
) -> web.AppRunner:
    """A runner with what the handlers rely on.

    A handler is cancelled when its client goes away: that is how a row ends.

    Args:
        receive_timeout: seconds that a connection may be without a request whose
            headers have come whole: a silent, slow or idle client.
        shutdown_timeout: seconds that `cleanup` waits for handlers before it
            cancels them; drain first, so that only readers that never read are left.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=receive_timeout,
    )
