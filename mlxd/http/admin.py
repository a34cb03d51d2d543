"""The admin API: strict JSON in and out, acting through `operations.Operations`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from mlxd.config import LiveTable
from mlxd.config.values import seconds
from mlxd.errors import BadRequest, ConfigError, Forbidden
from mlxd.http import ui
from mlxd.http.body import json_response, parse_object, read_bytes
from mlxd.http.context import CONTEXT
from mlxd.operations import Configuration, ModelStatus, Operations

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


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of calls that say everything in their path."""


T = TypeVar("T", DrainRequest, ResumeRequest, ReloadRequest, Nothing)


def admin_routes(operations: Operations) -> list[web.RouteDef]:
    """The routes under `/admin`."""
    admin = _Admin(operations)
    return [
        web.get("/admin/status", _direct(admin.status)),
        web.post("/admin/drain", _direct(admin.drain)),
        web.post("/admin/resume", _direct(admin.resume)),
        web.post("/admin/reload", _direct(admin.reload)),
        web.get("/admin/config", _direct(admin.config)),
        web.patch("/admin/models/{model:.+}/{table:batch|policy}", _direct(admin.patch)),
        web.post("/admin/models/{model:.+}/load", _direct(admin.load)),
        web.post("/admin/models/{model:.+}/unload", _direct(admin.unload)),
        web.post("/admin/models/{model:.+}/restart", _direct(admin.restart)),
        web.post("/admin/models/{model:.+}/cache/clear", _direct(admin.clear_cache)),
        web.get("/admin/ui", _direct(ui.page)),
        web.get("/admin/requests", _direct(admin.requests)),
        web.delete("/admin/requests/{request}", _direct(admin.cancel)),
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
        plan = await self._operations.reload(dry_run=asked.dry_run)
        return json_response({"dry_run": asked.dry_run, "plan": plan})

    async def config(self, _request: web.Request) -> web.Response:
        return _with_etag(self._operations.config())

    async def patch(self, request: web.Request) -> web.Response:
        table: LiveTable = "batch" if request.match_info["table"] == "batch" else "policy"
        changes = await _object(request)
        changed = await self._operations.patch(
            request.match_info["model"], table, changes, _etags(request)
        )
        return _with_etag(changed)

    async def load(self, request: web.Request) -> web.Response:
        return await self._change(request, self._operations.load)

    async def unload(self, request: web.Request) -> web.Response:
        return await self._change(request, self._operations.unload)

    async def restart(self, request: web.Request) -> web.Response:
        return await self._change(request, self._operations.restart)

    async def clear_cache(self, request: web.Request) -> web.Response:
        await _read(request, Nothing)
        self._operations.clear_cache(request.match_info["model"])
        return json_response({"cleared": request.match_info["model"]})

    async def requests(self, _request: web.Request) -> web.Response:
        return json_response({"requests": self._operations.requests()})

    async def cancel(self, request: web.Request) -> web.Response:
        count = self._operations.cancel(request.match_info["request"])
        return json_response({"cancelled": count})

    async def _change(
        self, request: web.Request, change: Callable[[str], Awaitable[ModelStatus]]
    ) -> web.Response:
        await _read(request, Nothing)
        return json_response(await change(request.match_info["model"]))


def _direct(handler: Handler) -> Handler:
    async def guarded(request: web.Request) -> web.Response:
        is_open = request.app[CONTEXT].access().token is None
        for name in FORWARDING:
            if is_open and name in request.headers:
                raise Forbidden(f"/admin is open, so that it takes no {name} requests")
        try:
            return await handler(request)
        except ConfigError as error:
            return _invalid_config(error)

    return guarded


def _invalid_config(error: ConfigError) -> web.Response:
    """The error envelope, and each problem by itself."""
    envelope = {
        "message": str(error),
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_config",
    }
    return json_response({"error": envelope, "problems": error.problems}, status=422)


async def _read(request: web.Request, kind: type[T]) -> T:
    """The body; none at all means every default.

    Raises:
        BadRequest: it is not JSON, or not what this call takes.
    """
    try:
        return msgspec.convert(await _object(request), kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from error


async def _object(request: web.Request) -> dict[str, Any]:
    body = await read_bytes(request, limit=MAX_BODY_BYTES)
    # An empty body says its type only by accident; anything else must: a form
    # of a foreign page cannot.
    if not body:
        return {}
    if request.content_type != "application/json":
        raise BadRequest(f"expected {hdrs.CONTENT_TYPE}: application/json")
    return parse_object(body)


def _with_etag(configuration: Configuration) -> web.Response:
    return json_response(configuration, headers={hdrs.ETAG: f'"{configuration.etag}"'})


def _etags(request: web.Request) -> list[str] | None:
    """What `If-Match` names; None where anything matches. A weak one never does, says its RFC."""
    try:
        etags = request.if_match
    except ValueError as error:
        raise BadRequest(f"expected etags in {hdrs.IF_MATCH}") from error
    if etags is None or any(etag.value == "*" for etag in etags):
        return None
    return [etag.value for etag in etags if not etag.is_weak]


def _timeout(value: float | str | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return min(seconds(value), LONGEST_DRAIN)
    except ValueError as error:
        raise BadRequest(str(error), param="timeout") from error
