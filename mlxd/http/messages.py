"""Chat messages as clients send them, into the plain form that templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlxd.errors import BadRequest
from mlxd.http.body import MAX_LEVELS
from mlxd.nesting import levels

#: Roles, and what templates call them: few know OpenAI's newer name for the system's.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
_TEXT_PARTS = frozenset({"text", "refusal"})
_IMAGE_PARTS = frozenset({"image_url", "image", "input_image"})


def parse_messages(messages: Sequence[object]) -> tuple[dict[str, Any], ...]:
    """Messages with text content, their other fields kept for the template.

    Raises:
        BadRequest: naming the part that cannot be used.
    """
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(messages))


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    kept = {key: value for key, value in message.items() if value is not None}
    kept["role"] = parse_role(message.get("role"), at)
    kept["content"] = _content(message.get("content"), kept["role"], f"{at}.content")
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{at}.tool_calls")
    return kept


def parse_role(role: object, at: str) -> str:
    """A message's role, as templates call it. Raises BadRequest."""
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    return _ROLES[role]


def _content(content: object, role: str, at: str) -> str:
    if content is None and role in {"assistant", "function"}:
        return ""  # beside tool calls; templates join it as text
    return content_text(content, at, _TEXT_PARTS)


def content_text(content: object, at: str, kinds: frozenset[str]) -> str:
    """The text of a content: itself, or its parts joined.

    Args:
        kinds: of parts that hold text.

    Raises:
        BadRequest: naming the part that holds none.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{at}[{i}]", kinds) for i, part in enumerate(content))
    raise BadRequest(f"{at} must be text, or a list of parts that is not empty", param=at)


def _part(part: object, at: str, kinds: frozenset[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise BadRequest(f"{at} must be an object with a type", param=at)
    if kind in _IMAGE_PARTS:
        raise BadRequest("this model takes no images", param=at, code="images_not_supported")
    if kind not in kinds:
        raise BadRequest(f"{at}.type {kind[:80]!r} is not supported; use text", param=f"{at}.type")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
    return text


def _tool_calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{at} must be a list", param=at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise BadRequest(f"{at} must be an object with a function", param=at)
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{at}.function.name must be a string", param=f"{at}.function.name")
    arguments = parse_arguments(function.get("arguments"))
    return call | {"function": function | {"arguments": arguments}}


def parse_arguments(arguments: object) -> object:
    """Templates print an object; one that a model broke stays the text that it was."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict) or levels(parsed, MAX_LEVELS) > MAX_LEVELS:
        return arguments
    return parsed
