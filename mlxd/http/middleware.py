"""What surrounds every handler: the request's id, its log line, its error envelope."""

from __future__ import annotations

import asyncio
import re
import uuid

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from mlxd.errors import MlxdError
from mlxd.http.auth import identify, offered, scope_of
from mlxd.http.context import CONTEXT, RECORD, Record
from mlxd.http.envelope import error_response
from mlxd.traces import Story

REQUEST_ID_HEADER = "x-request-id"

# Anything else could forge log lines or headers downstream.
_sane_id = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Asked every few seconds by machines; their lines would drown the others.
_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})

log = structlog.get_logger("mlxd.request")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: nothing passes it but answers, and clients that went away."""
    record = Record(_request_id(request), asyncio.get_running_loop().time())
    request[RECORD] = record
    status: int | None = None  # of the answer; None = the client left before there was one
    try:
        response = await _answer(request, handler, record)
        status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        record.facts.setdefault("outcome", "cancelled")
        raise
    finally:
        now = asyncio.get_running_loop().time()
        _log_line(request, record, status, now)
        _trace(request, record, status, now)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse who may not do this, before anything of the request is read."""
    access = request.app[CONTEXT].access()
    secret = offered(request.headers)
    request[RECORD].caller = identify(access, scope_of(request.path), secret)
    return await handler(request)


async def stamp_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: every answer names its request, streams included."""
    if (record := request.get(RECORD)) is not None:
        response.headers[REQUEST_ID_HEADER] = record.request_id


async def _answer(request: web.Request, handler: Handler, record: Record) -> web.StreamResponse:
    try:
        return await handler(request)
    except (MlxdError, web.HTTPError) as error:
        record.facts["error"] = error.code if isinstance(error, MlxdError) else error.reason
        response = error_response(error, request.path)
    except (web.RequestPayloadError, HttpProcessingError) as error:  # a body that is not as told
        record.facts["error"] = type(error).__name__
        response = error_response(error, request.path)
    except ConnectionError:
        raise
    except Exception as error:
        log.exception("unexpected error", id=record.request_id, path=request.path)
        record.facts["error"] = type(error).__name__
        response = error_response(error, request.path)
    # Of what never became a request for tokens; its own end comes first.
    record.facts.setdefault("outcome", "rejected" if response.status < 500 else "error")
    return response


def _request_id(request: web.Request) -> str:
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return sent if _sane_id.fullmatch(sent) else uuid.uuid4().hex


def _log_line(request: web.Request, record: Record, status: int | None, now: float) -> None:
    facts = record.facts | _seconds(record)
    if record.caller.name is not None:
        facts["key"] = record.caller.name
    write = log.debug if request.path in _QUIET_PATHS else log.info
    write(
        "request",
        id=record.request_id,
        method=request.method,
        path=request.path,
        status=status,
        seconds=round(now - record.started, 4),
        **facts,
    )


def _seconds(record: Record) -> dict[str, float]:
    """How long each part took, of those that it came to."""
    parts: dict[str, float | None] = {}
    if record.first_token is not None:
        parts["first_token"] = record.first_token - record.started
    if (timings := record.timings) is not None:
        parts |= {"queue": timings.queue, "prefill": timings.prefill, "decode": timings.decode}
    return {f"{part}_seconds": round(took, 4) for part, took in parts.items() if took is not None}


def _trace(request: web.Request, record: Record, status: int | None, now: float) -> None:
    tell = request.app[CONTEXT].tell
    if tell is None or request.path in _QUIET_PATHS:
        return
    resource = request.match_info.route.resource
    story = Story(
        method=request.method,
        route=None if resource is None else resource.canonical,
        status=status,
        headers=request.headers,
        started=record.started,
        ended=now,
        timings=record.timings,
        facts=record.facts | {"request_id": record.request_id},
    )
    tell(story)
