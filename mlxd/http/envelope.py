"""Failures as a client sees them: status, headers and the OpenAI error envelope."""

from __future__ import annotations

from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxd.errors import BadRequest, MethodNotAllowed, MlxdError, NotFound, TooLarge, Unauthorized
from mlxd.http.body import json_response


def domain_error(error: Exception) -> MlxdError:
    """The error that a client is told about: nothing of an unexpected one's insides."""
    match error:
        case MlxdError():
            return error
        case web.HTTPError():
            return _http_error(error)
        case web.RequestPayloadError() | HttpProcessingError():
            return BadRequest(f"the request body cannot be read: {error}")
        case _:
            return MlxdError("the server failed to handle this request; its log says more")


def _http_error(error: web.HTTPError) -> MlxdError:
    """An error of aiohttp's own."""
    match error:
        case web.HTTPNotFound():
            return NotFound("no such route")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"{error.method} is not allowed here")
        case web.HTTPRequestEntityTooLarge():
            return TooLarge("the request body is too large")
        case _:
            told = BadRequest(error.reason) if error.status < 500 else MlxdError(error.reason)
            told.status = error.status
            return told


def error_body(error: MlxdError) -> dict[str, Any]:
    """The envelope of an error, also used as an event in streams."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: Exception) -> web.Response:
    """The whole answer for a request that failed before its headers went out."""
    told = domain_error(error)
    headers: dict[str, str] = {}
    if told.retry_after is not None:
        headers[hdrs.RETRY_AFTER] = str(told.retry_after)
    if isinstance(told, Unauthorized):
        headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="mlxd"'
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
    return json_response(error_body(told), status=told.status, headers=headers)
