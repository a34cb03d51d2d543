"""Liveness, readiness and metrics. Probes tell nothing but state."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from mlxd.errors import BadRequest
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
    """The exposition of a registry.

    The client library fails on an `Accept` whose version is no number; what it
    cannot read is the client's fault.
    """
    expose = make_aiohttp_handler(registry)

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await expose(request)
        except (TypeError, ValueError):
            raise BadRequest("the Accept header names no known version", param="Accept") from None

    return handler


def routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """Probe routes and `/metrics` of this registry."""
    return [
        web.get("/livez", livez),
        web.get("/readyz", readyz),
        web.get("/health", health),
        web.get("/metrics", metrics(registry)),
    ]
