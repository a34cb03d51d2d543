"""Anthropic's messages, into the plain form that templates take.

One of its messages can hold results of tools beside text; templates want those as
messages of their own. Text blocks are joined as they stand, as other servers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxd.errors import BadRequest

_ROLES = ("user", "assistant", "system")


def parse_anthropic_messages(
    messages: Sequence[object], system: object
) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The conversation, and whether the answer goes on with its last message.

    Raises:
        BadRequest: naming the part that cannot be used.
    """
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": _text(system, "system", between="\n")})
    for index, message in enumerate(messages):
        found += _message(message, f"messages[{index}]")
    return tuple(found), found[-1]["role"] == "assistant"


def _message(message: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise BadRequest(
            f"{at}.content must be text, or a list of blocks that is not empty",
            param=f"{at}.content",
        )
    blocks = [_block(block, f"{at}.content[{i}]") for i, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, f"{at}.content")]
    return _user(role, blocks, f"{at}.content")


def _block(block: object, at: str) -> dict[str, Any]:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise BadRequest(f"{at} must be an object with a type", param=at)
    return block


def _assistant(blocks: Sequence[dict[str, Any]], at: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        match block["type"]:
            case "text":
                message["content"] += _string(block, "text", where)
            case "thinking":
                thinking = message.get("reasoning_content", "")
                message["reasoning_content"] = thinking + _string(block, "thinking", where)
            case "redacted_thinking":
                pass  # what another server hid
            case "tool_use":
                message.setdefault("tool_calls", []).append(_tool_use(block, where))
            case kind:
                raise _unknown(kind, where)
    return message


def _user(role: str, blocks: Sequence[dict[str, Any]], at: str) -> list[dict[str, Any]]:
    """Results of tools, and what is said beside them, in their order."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        if block["type"] == "tool_result" and role == "user":
            messages.append(_tool_result(block, where))
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _part(block, where)
        else:
            messages.append({"role": role, "content": _part(block, where)})
    return messages


def _tool_use(block: dict[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise BadRequest(f"{at}.input must be an object", param=f"{at}.input")
    function = {"name": _string(block, "name", at), "arguments": block["input"]}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], at: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _text(content, f"{at}.content", between="")
    identity = _string(block, "tool_use_id", at)
    return {"role": "tool", "tool_call_id": identity, "content": text}


def _text(content: object, at: str, *, between: str) -> str:
    """Text, or text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{at} must be text or a list of blocks", param=at)
    parts = [_part(_block(block, f"{at}[{i}]"), f"{at}[{i}]") for i, block in enumerate(content)]
    return between.join(parts)


def _part(block: dict[str, Any], at: str) -> str:
    match block["type"]:
        case "text":
            return _string(block, "text", at)
        case "image":
            raise BadRequest("this model takes no images", param=at, code="images_not_supported")
        case "document":
            return _document(block, at)
        case kind:
            raise _unknown(kind, at)


def _document(block: dict[str, Any], at: str) -> str:
    """A document that came as plain text."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise BadRequest(f"{at}.source must have the type 'text'", param=f"{at}.source")
    return _string(source, "data", f"{at}.source")


def _string(block: dict[str, Any], key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
    return value


def _unknown(kind: object, at: str) -> BadRequest:
    return BadRequest(f"{at}.type {str(kind)[:80]!r} is not supported here", param=f"{at}.type")
