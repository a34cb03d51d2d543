"""The admin API: strict JSON in and out, acting through `operations.Operations`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from mlxd.config.values import seconds
from mlxd.errors import BadRequest, ConfigError, Forbidden
from mlxd.http.body import json_response, parse_object, read_bytes
from mlxd.http.context import CONTEXT
from mlxd.operations import Operations

MAX_BODY_BYTES = 64 * 1024
LONGEST_DRAIN = 7 * 24 * 3600.0  # seconds
#: Set by proxies. While /admin is open, only this machine may use it, and directly.
FORWARDING = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")

Handler = Callable[[web.Request], Awaitable[web.Response]]


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /admin/drain`."""

    model: str | None = None
    timeout: Annotated[float, Meta(ge=0, le=LONGEST_DRAIN)] | str | None = None
    wait: bool = True


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /admin/resume`."""

    model: str | None = None


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /admin/reload`."""

    dry_run: bool = False


T = TypeVar("T", DrainRequest, ResumeRequest, ReloadRequest)


def admin_routes(operations: Operations) -> list[web.RouteDef]:
    """The routes under `/admin`."""
    admin = _Admin(operations)
    return [
        web.get("/admin/status", _direct(admin.status)),
        web.post("/admin/drain", _direct(admin.drain)),
        web.post("/admin/resume", _direct(admin.resume)),
        web.post("/admin/reload", _direct(admin.reload)),
    ]


class _Admin:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def status(self, _request: web.Request) -> web.Response:
        return json_response(self._operations.status())

    async def drain(self, request: web.Request) -> web.Response:
        asked = await _read(request, DrainRequest)
        report = await self._operations.drain(
            asked.model, timeout=_timeout(asked.timeout), wait=asked.wait
        )
        if report.state == "drained":
            return json_response(report)
        return json_response(report, status=504 if asked.wait else 202)

    async def resume(self, request: web.Request) -> web.Response:
        asked = await _read(request, ResumeRequest)
        return json_response(self._operations.resume(asked.model))

    async def reload(self, request: web.Request) -> web.Response:
        asked = await _read(request, ReloadRequest)
        try:
            plan = await self._operations.reload(dry_run=asked.dry_run)
        except ConfigError as error:
            return json_response(
                {
                    "error": {
                        "message": str(error),
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "invalid_config",
                    },
                    "problems": error.problems,
                },
                status=422,
            )
        return json_response({"dry_run": asked.dry_run, "plan": plan})


def _direct(handler: Handler) -> Handler:
    async def guarded(request: web.Request) -> web.Response:
        is_open = request.app[CONTEXT].access().token is None
        for name in FORWARDING:
            if is_open and name in request.headers:
                raise Forbidden(f"/admin is open, so that it takes no {name} requests")
        return await handler(request)

    return guarded


async def _read(request: web.Request, kind: type[T]) -> T:
    """The body; none at all means every default.

    Raises:
        BadRequest: it is not JSON, or not what this call takes.
    """
    body = await read_bytes(request, limit=MAX_BODY_BYTES)
    # An empty body says its type only by accident; anything else must: a form
    # of a foreign page cannot.
    if not body:
        return kind()
    if request.content_type != "application/json":
        raise BadRequest(f"expected {hdrs.CONTENT_TYPE}: application/json")
    try:
        return msgspec.convert(parse_object(body), kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from error


def _timeout(value: float | str | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return min(seconds(value), LONGEST_DRAIN)
    except ValueError as error:
        raise BadRequest(str(error), param="timeout") from error
