"""Tools as clients offer them, into the plain form that templates and parsers take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxd.errors import BadRequest

# Agents bring hundreds; each costs room in the prompt, which the context limits.
MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Function:
    """A tool, checked."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None

    def plain(self) -> dict[str, Any]:
        """As OpenAI's chat completions have it: what templates were written for."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        # Templates read `parameters.properties` without asking.
        empty = {"type": "object", "properties": {}}
        function["parameters"] = self.parameters or empty
        return {"type": "function", "function": function}


def parse_function(function: object, at: str, *, parameters: str = "parameters") -> Function:
    """One function.

    Args:
        at: its place in the body, for errors.
        parameters: what this protocol calls the JSON schema of its arguments.

    Raises:
        BadRequest: naming the part that cannot be used.
    """
    if not isinstance(function, dict):
        raise BadRequest(f"{at} must be an object", param=at)
    name, description = function.get("name"), function.get("description")
    schema = function.get(parameters)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(
            f"{at}.name must be 1 to 128 letters, digits, or any of _.:-", param=f"{at}.name"
        )
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{at}.description must be a string", param=f"{at}.description")
    if schema is not None and not isinstance(schema, dict):
        raise BadRequest(f"{at}.{parameters} must be an object", param=f"{at}.{parameters}")
    return Function(name, description, schema)


def parse_chat_tools(tools: Sequence[object]) -> tuple[dict[str, Any], ...]:
    """`tools` of a chat completion.

    Raises:
        BadRequest: naming the part that cannot be used.
    """
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{at} must be an object", param=at)
        if tool.get("type") != "function":
            raise BadRequest(f"{at}.type must be 'function'", param=f"{at}.type")
        functions.append(parse_function(tool.get("function"), f"{at}.function"))
    return all_tools(functions)


def all_tools(functions: Sequence[Function]) -> tuple[dict[str, Any], ...]:
    """All tools of a request.

    Raises:
        BadRequest: two of one name, or too many.
    """
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"at most {MAX_TOOLS} tools", param="tools")
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadRequest(f"two tools are called {name!r}", param=f"tools[{index}]")
    return tuple(function.plain() for function in functions)
