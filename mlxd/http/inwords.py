"""Tools in plain words, for models whose chat template does not know of any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = tuple[dict[str, Any], ...]

_OFFER = """\
You can call these functions:
{functions}
To call one, answer with nothing but JSON: {{"name": its name, "arguments": {{...}}}}"""


def in_words(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """The conversation with tools, calls and results as text of roles that every template has."""
    said = [_in_words(message) for message in messages]
    if not tools:
        return tuple(said)
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    offer = _OFFER.format(functions=functions)
    if said[0]["role"] == "system":
        first = said[0] | {"content": f"{said[0]['content']}\n\n{offer}"}
        return (first, *said[1:])
    return ({"role": "system", "content": offer}, *said)


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message["role"] in {"tool", "function"}:
        return {"role": "user", "content": message["content"]}
    if not calls:
        return message
    written = [message["content"], *(_json(call["function"]) for call in calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(part for part in written if part)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
