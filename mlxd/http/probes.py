"""Liveness, readiness and metrics. Probes tell nothing but state."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from mlxd.http.body import json_response
from mlxd.http.context import CONTEXT


async def livez(_: web.Request) -> web.Response:
    """200 while the process answers at all."""
    return json_response({"status": "alive"})


async def readyz(request: web.Request) -> web.Response:
    """200 where traffic should be sent, for the daemon or with `?model=` for one model."""
    return _readiness(request, request.query.get("model"))


async def health(request: web.Request) -> web.Response:
    """As `/readyz`, for clients that know this name."""
    return _readiness(request, None)


def _readiness(request: web.Request, model: str | None) -> web.Response:
    if request.app[CONTEXT].directory.ready(model):
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable"}, status=503)


def metrics(registry: CollectorRegistry) -> Handler:
    """The exposition of a registry, in the text format that every Prometheus reads.

    Not in OpenMetrics, whichever is asked for: the client library writes a colon in
    a name as an underscore there, and vLLM's names would not be vLLM's.
    """

    async def handler(_: web.Request) -> web.Response:
        headers = {hdrs.CONTENT_TYPE: CONTENT_TYPE_PLAIN_0_0_4}
        response = web.Response(body=generate_latest(registry), headers=headers)
        response.enable_compression()
        return response

    return handler


def routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """Probe routes and `/metrics` of this registry."""
    return [
        web.get("/livez", livez),
        web.get("/readyz", readyz),
        web.get("/health", health),
        web.get("/metrics", metrics(registry)),
    ]
