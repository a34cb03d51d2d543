"""The input items of `/v1/responses`, into the messages that templates take.

What a model said is several items there (reasoning, text, calls) and one message here.
"""

from __future__ import annotations

from typing import Any

from mlxd.errors import BadRequest
from mlxd.http.messages import content_text, parse_arguments, parse_role

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})


def parse_input(given: object) -> tuple[dict[str, Any], ...]:
    """The messages of an input: text, or a list of items.

    Raises:
        BadRequest: naming the part that cannot be used.
    """
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be text, or a list of items that is not empty", param="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return tuple(messages)


def as_message(output: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What a response said, as the message that its conversation goes on with."""
    return parse_input(output) if output else ()


def _add(messages: list[dict[str, Any]], item: object, at: str) -> None:
    if not isinstance(item, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    match item.get("type", "message"):
        case "message":
            role = parse_role(item.get("role"), at)
            text = content_text(item.get("content"), f"{at}.content", _TEXT_PARTS)
            if role == "assistant":
                _said(messages, content=text)
            else:
                messages.append({"role": role, "content": text})
        case "reasoning":
            _said(messages, reasoning_content=_reasoning(item, at))
        case "function_call":
            _called(messages, item, at)
        case "function_call_output":
            output = content_text(item.get("output"), f"{at}.output", _TEXT_PARTS)
            identity = _string(item, "call_id", at)
            messages.append({"role": "tool", "tool_call_id": identity, "content": output})
        case kind:
            raise BadRequest(f"{at}.type {str(kind)[:80]!r} is not supported", param=f"{at}.type")


def _said(messages: list[dict[str, Any]], **more: str) -> dict[str, Any]:
    """The assistant's message that is still open, with this added to it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    for key, text in more.items():
        message[key] = message.get(key, "") + text
    return message


def _called(messages: list[dict[str, Any]], item: dict[str, Any], at: str) -> None:
    name, identity = _string(item, "name", at), _string(item, "call_id", at)
    function = {"name": name, "arguments": parse_arguments(item.get("arguments"))}
    call = {"id": identity, "type": "function", "function": function}
    _said(messages).setdefault("tool_calls", []).append(call)


def _reasoning(item: dict[str, Any], at: str) -> str:
    """The text of a reasoning item; one that another server encrypted has none."""
    content = item.get("content")
    if content is None or content == []:
        return ""
    return content_text(content, f"{at}.content", frozenset({"reasoning_text", "text"}))


def _string(item: dict[str, Any], key: str, at: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
    return value
