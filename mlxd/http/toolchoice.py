"""`tool_choice` in each protocol's form: which tools may be called, and whether one must be.

A call that must come is enforced as JSON of one shape, whatever the model's own form of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxd.errors import BadRequest
from mlxd.http.requests import JsonFormat

Tools = tuple[dict[str, Any], ...]

_PARAM = "tool_choice"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a model may do with the tools of a request."""

    tools: Tools  # that it may call, and is shown
    required: bool = False  # the answer is a call

    @property
    def format(self) -> JsonFormat | None:
        """What the answer has to be; None = what the model likes."""
        if not self.required:
            return None
        functions = [tool["function"] for tool in self.tools]
        if len(functions) == 1:
            return JsonFormat(_call(functions[0], "#"), "tools")
        calls = [_call(each, f"#/anyOf/{index}") for index, each in enumerate(functions)]
        return JsonFormat({"anyOf": calls}, "tools")


def chat_choice(choice: object, tools: Tools) -> Choice:
    """Of a chat completion. Raises BadRequest."""
    match choice:
        case "none":
            return Choice(())  # not shown to the model where it may not call them
        case "auto":
            return Choice(tools)
        case "required":
            return _required(tools)
        case {"type": "function", "function": {"name": str(name)}}:
            return _required(_named([name], tools))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*each]},
        }:
            names = [_chat_name(tool, index) for index, tool in enumerate(each)]
            return _allowed(mode, _named(names, tools))
    raise _malformed()


def responses_choice(choice: object, tools: Tools) -> Choice:
    """Of a response, whose tools have no `function` around their names. Raises BadRequest."""
    match choice:
        case {"type": "function", "name": str(name)}:
            return _required(_named([name], tools))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*each]}:
            names = [_responses_name(tool, index) for index, tool in enumerate(each)]
            return _allowed(mode, _named(names, tools))
        case str():
            return chat_choice(choice, tools)
    raise _malformed()


def anthropic_choice(kind: str, name: str | None, tools: Tools) -> Choice:
    """Of a message. Raises BadRequest."""
    match kind:
        case "any":
            return _required(tools)
        case "tool":
            return _required(_named([name or ""], tools))
    return Choice(() if kind == "none" else tools)


def _required(tools: Tools) -> Choice:
    if not tools:
        raise BadRequest("a tool_choice that requires a call needs tools", param=_PARAM)
    return Choice(tools, required=True)


def _allowed(mode: str, tools: Tools) -> Choice:
    return _required(tools) if mode == "required" else Choice(tools)


def _named(names: Sequence[str], tools: Tools) -> Tools:
    """The tools of these names."""
    found = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if len(found) < len(set(names)):
        raise BadRequest("tool_choice names a tool that is not among tools", param=_PARAM)
    return found


def _chat_name(tool: object, index: int) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _nameless(f"{_PARAM}.allowed_tools.tools[{index}]")


def _responses_name(tool: object, index: int) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    raise _nameless(f"{_PARAM}.tools[{index}]")


def _nameless(at: str) -> BadRequest:
    return BadRequest(f"{at} must be a function with a name", param=at)


def _malformed() -> BadRequest:
    return BadRequest(
        "tool_choice must be 'auto', 'none', 'required', a function, or allowed_tools",
        param=_PARAM,
    )


def _call(function: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The schema of one call of this function, which stands at this place."""
    arguments = _moved(function["parameters"], f"{at}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, under: str) -> Any:  # noqa: ANN401 - any part of a schema
    """A schema as a part of another: its references begin where it now stands."""
    match schema:
        case {"$ref": str(reference), **rest} if reference.startswith("#"):
            return {"$ref": under + reference[1:]} | {k: _moved(v, under) for k, v in rest.items()}
        case Mapping():
            return {key: _moved(value, under) for key, value in schema.items()}
        case list():
            return [_moved(value, under) for value in schema]
    return schema
