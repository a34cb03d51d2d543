"""Failures as a client sees them: status, headers and the OpenAI error envelope."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from mlxd.errors import BadRequest, MethodNotAllowed, MlxdError, NotFound, TooLarge, Unauthorized
from mlxd.http.body import json_response

_ANTHROPIC = re.compile(r"/v1/messages(/|$)")


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


#: Anthropic's names of errors, by status; by the hundred for the others.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_body(error: MlxdError) -> dict[str, Any]:
    """Anthropic's envelope of an error, also used as an event in streams."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: Exception, path: str) -> web.Response:
    """The whole answer for a request that failed before its headers went out.

    Args:
        path: of the request, which tells its protocol.
    """
    told = domain_error(error)
    headers: dict[str, str] = {}
    if told.retry_after is not None:
        headers[hdrs.RETRY_AFTER] = str(told.retry_after)
    if isinstance(told, Unauthorized):
        headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="mlxd"'
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
    body = anthropic_error_body(told) if _ANTHROPIC.match(path) else error_body(told)
    return json_response(body, status=told.status, headers=headers)
