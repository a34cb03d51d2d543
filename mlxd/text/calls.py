"""Tool calls as a model wrote them, into calls that a client can run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxd.text.pieces import ToolCall

#: mlx-lm's: a call's text and the request's tools, in OpenAI's shape, to one call or several.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], Any]


class NoCall(Exception):
    """The text is not a call of a tool that was offered."""


def parse_calls(
    text: str, parser: ToolParser, tools: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """The calls in this text, at least one.

    Raises:
        NoCall: the parser gave up, or what it found is no call of one of `tools`
            with a JSON object as arguments.
    """
    names = {tool["function"]["name"] for tool in tools}
    try:
        found = parser(text, tools)
    except Exception as error:  # parsers are programs on a model's words: they may raise anything
        raise NoCall(f"{type(error).__name__}: {error}") from error
    calls = [_call(each, names) for each in (found if isinstance(found, list) else [found])]
    if not calls:
        raise NoCall("the parser found no call")
    return calls


def _call(found: object, names: set[str]) -> ToolCall:
    if not isinstance(found, dict):
        raise NoCall("a call is an object")
    name = found.get("name")
    if not isinstance(name, str) or name not in names:
        raise NoCall(f"{name!r} is not a tool of this request")
    given = found.get("id")
    # Some models number their calls, and their templates want to see the number again.
    identity = given if isinstance(given, str) and given else f"call_{uuid.uuid4().hex[:24]}"
    return ToolCall(identity, name, _arguments(found.get("arguments")))


def _arguments(arguments: object) -> str:
    """The arguments as JSON. Parsers give an object, some its text, and `None` for none."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        written = json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a surrogate pair can be escaped, and then not be sent
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCall(f"the arguments are not JSON: {error}") from error
    if not written.startswith("{"):
        raise NoCall("the arguments are not an object")
    return written
