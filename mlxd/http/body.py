"""JSON bodies, in and out: strict about what comes in."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from mlxd.errors import BadRequest, TooLarge, TooSlow
from mlxd.http.context import CONTEXT
from mlxd.nesting import levels

#: Levels of a body. Whatever follows it later (templates, schemas, JSON again) is recursive.
MAX_LEVELS = 128
_MAX_DIGITS = 308  # of a number that a float holds for certain

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return _encoder.encode(value)


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A whole answer in JSON."""
    return web.Response(
        body=to_json(value), status=status, headers=headers, content_type="application/json"
    )


async def read_object(request: web.Request, *, limit: int) -> dict[str, Any]:
    """The request's body, a JSON object.

    Args:
        limit: bytes, counted after decompression.

    Raises:
        TooLarge: the body is longer.
        TooSlow: it did not come within `server.receive_timeout`.
        BadRequest: it is not sent as JSON, or is not one JSON object.
    """
    if request.content_type != "application/json":
        raise BadRequest("expected Content-Type: application/json")
    return parse_object(await read_bytes(request, limit=limit))


def parse_object(data: bytes) -> dict[str, Any]:
    """One JSON object in UTF-8: no BOM, no duplicate keys, no lone surrogates, and every
    number finite.

    Raises:
        BadRequest: it is anything else, or nested too deeply.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise BadRequest("the body begins with a byte order mark; send plain UTF-8")
    try:
        text = data.decode()
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
        if b"\\u" in data:  # escaped lone surrogates parse, and then no tokenizer takes them
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8") from None
    except UnicodeEncodeError:
        raise BadRequest("the body holds half of a surrogate pair") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except ValueError:
        raise _too_large(text) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    if _may_be_deep(data) and levels(value, MAX_LEVELS) > MAX_LEVELS:
        raise _too_deep()
    return value


async def read_bytes(request: web.Request, *, limit: int) -> bytes:
    """The request's body, whole. Raises TooLarge and TooSlow, as `read_object`."""
    seconds = request.app[CONTEXT].server().receive_timeout
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit)
    except TimeoutError:
        raise TooSlow(f"the request body took longer than {seconds:g} s") from None


async def _read(request: web.Request, limit: int) -> bytes:
    too_large = TooLarge(f"the request body is larger than {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        shown = twice[:80].encode(errors="backslashreplace").decode()  # lone surrogates, too
        raise BadRequest(f"the key {shown!r} appears twice in one object", param=shown)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _too_large(text: str) -> BadRequest:
    """Of a body with a number that is beyond a float, or is longer than Python reads."""
    try:
        pending = [("", json.loads(text, parse_int=_integer))]
    except (ValueError, RecursionError):  # there is more that is wrong with it
        pending = []
    while pending:
        at, value = pending.pop()
        match value:
            case float() if math.isinf(value):
                return BadRequest(f"{at} is too large a number", param=at)
            case dict():
                pending += [(f"{at}.{key}".lstrip("."), each) for key, each in value.items()]
            case list():
                pending += [(f"{at}[{index}]", each) for index, each in enumerate(value)]
    return BadRequest("the body holds too large a number")


def _integer(digits: str) -> float:
    return math.inf if len(digits) > _MAX_DIGITS else int(digits)


def _may_be_deep(data: bytes) -> bool:
    """Cheap, and true of few bodies that are not."""
    return data.count(b"[") + data.count(b"{") > MAX_LEVELS


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested more than {MAX_LEVELS} levels deep")


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not a JSON number")
