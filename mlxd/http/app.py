"""The public application: routes, middlewares, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry

from mlxd.config import ServerSettings
from mlxd.http import openai, probes
from mlxd.http.access import add_cors, guard
from mlxd.http.context import CONTEXT, Context
from mlxd.http.middleware import observe, stamp_request_id
from mlxd.serving import Directory


def make_app(
    directory: Directory,
    *,
    server: Callable[[], ServerSettings],
    registry: CollectorRegistry,
    extra_routes: Sequence[web.AbstractRouteDef] = (),
) -> web.Application:
    """The whole public application; keeps no state, so that several may exist.

    Args:
        server: settings of the moment, read for each request.
        registry: what `/metrics` shows.
        extra_routes: mounted beside the public ones, behind the same checks.
    """
    # The body's limit can change with a reload: `read_object` enforces it, not aiohttp.
    app = web.Application(middlewares=[observe, guard], client_max_size=0)
    app[CONTEXT] = Context(directory, server)
    app.on_response_prepare.append(stamp_request_id)
    app.on_response_prepare.append(add_cors)
    app.add_routes([*probes.routes(registry), *openai.ROUTES, *extra_routes])
    return app


def make_runner(app: web.Application, *, shutdown_timeout: float) -> web.AppRunner:
    """A runner with what the handlers rely on.

    A handler is cancelled when its client goes away: that is how a row ends.

    Args:
        shutdown_timeout: seconds that `cleanup` waits for handlers before it
            cancels them; drain first, so that only readers that never read are left.
    """
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout
    )
