"""What `/openapi.json` says of the fields that are parsed by hand: messages, prompts, tools."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from mlxd.http.tools import MAX_TOOLS

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}


def _object(required: list[str], **properties: object) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: object, **more: object) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _either(*kinds: object) -> dict[str, Any]:
    return {"anyOf": list(kinds)}


def _parts(*kinds: str) -> dict[str, Any]:
    """Text, or parts of these kinds."""
    part = _object(["type", "text"], type={"enum": list(kinds)}, text=_TEXT)
    return _either(_TEXT, _list(part, minItems=1))


def _roles(*roles: str) -> dict[str, Any]:
    return {"enum": list(roles)}


_CALL = _object(
    ["function"],
    id=_TEXT,
    type={"const": "function"},
    function=_object(["name", "arguments"], name=_TEXT, arguments=_TEXT),
)
_FUNCTION = _object(["name"], name=_TEXT, description=_TEXT, parameters=_OBJECT)
_CHAT_MESSAGE = _either(
    _object(
        ["role", "content"],
        role=_roles("system", "developer", "user", "tool"),
        content=_parts("text"),
        tool_call_id=_TEXT,
    ),
    _object(
        ["role"],
        role=_roles("assistant"),
        content=_parts("text"),
        reasoning_content=_TEXT,
        tool_calls=_list(_CALL),
    ),
)
_BLOCK = _either(
    _object(["type", "text"], type={"const": "text"}, text=_TEXT),
    _object(["type", "tool_use_id"], type={"const": "tool_result"}, tool_use_id=_TEXT),
)
_ANSWER_BLOCK = _either(
    _object(["type", "text"], type={"const": "text"}, text=_TEXT),
    _object(["type", "thinking"], type={"const": "thinking"}, thinking=_TEXT),
    _object(
        ["type", "id", "name", "input"],
        type={"const": "tool_use"},
        id=_TEXT,
        name=_TEXT,
        input=_OBJECT,
    ),
)
_MESSAGE = _either(
    _object(
        ["role", "content"],
        role=_roles("user"),
        content=_either(_TEXT, _list(_BLOCK, minItems=1)),
    ),
    _object(
        ["role", "content"],
        role=_roles("assistant"),
        content=_either(_TEXT, _list(_ANSWER_BLOCK, minItems=1)),
    ),
)
_ITEM = _either(
    _object(
        ["role", "content"],
        role=_roles("system", "developer", "user", "assistant"),
        content=_parts("input_text", "output_text"),
    ),
    _object(
        ["type", "call_id", "name", "arguments"],
        type={"const": "function_call"},
        call_id=_TEXT,
        name=_TEXT,
        arguments=_TEXT,
    ),
    _object(
        ["type", "call_id", "output"],
        type={"const": "function_call_output"},
        call_id=_TEXT,
        output=_TEXT,
    ),
)
_TOKENS = _list({"type": "integer", "minimum": 0})

ChatMessages = Annotated[list[Any], WithJsonSchema(_list(_CHAT_MESSAGE, minItems=1))]
AnthropicMessages = Annotated[list[Any], WithJsonSchema(_list(_MESSAGE, minItems=1))]
AnthropicSystem = Annotated[Any, WithJsonSchema(_parts("text"))]
ResponsesInput = Annotated[Any, WithJsonSchema(_either(_TEXT, _list(_ITEM, minItems=1)))]
Prompts = Annotated[Any, WithJsonSchema(_either(_TEXT, _TOKENS, _list(_TEXT), _list(_TOKENS)))]
Stops = WithJsonSchema(_either(_TEXT, _list({"type": "string", "minLength": 1})))
ToolChoice = Annotated[Any, WithJsonSchema(_either({"enum": ["auto", "none"]}, _OBJECT))]


def _tools(tool: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema(_list(tool, maxItems=MAX_TOOLS))


_AtMost = Field(max_length=MAX_TOOLS)
ChatTools = Annotated[
    list[Any],
    _AtMost,
    _tools(_object(["type", "function"], type={"const": "function"}, function=_FUNCTION)),
]
ResponsesTools = Annotated[
    list[Any],
    _AtMost,
    _tools(
        _object(
            ["type", "name"],
            type={"const": "function"},
            name=_TEXT,
            description=_TEXT,
            parameters=_OBJECT,
        )
    ),
]
AnthropicTools = Annotated[
    list[Any],
    _AtMost,
    _tools(_object(["name", "input_schema"], name=_TEXT, description=_TEXT, input_schema=_OBJECT)),
]
