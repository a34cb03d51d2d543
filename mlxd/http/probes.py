"""Liveness, readiness and metrics. Probes tell nothing but state."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

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


def routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """Probe routes and `/metrics` of this registry."""
    return [
        web.get("/livez", livez),
        web.get("/readyz", readyz),
        web.get("/health", health),
        web.get("/metrics", make_aiohttp_handler(registry)),
    ]
