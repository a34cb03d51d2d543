"""Every parser of a body, given whole ones that are spoilt in one place."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd.errors import BadRequest
from mlxd.http.anthropic_schema import parse_anthropic
from mlxd.http.responses_schema import read_responses, responses_request
from mlxd.http.schema import parse_chat, parse_completion

TOOL = {"name": "f", "description": "", "parameters": {"properties": {"a": {"$ref": "#"}}}}
CALL = {"name": "f", "arguments": "{}"}
SCHEMA = {"properties": {"a": {"type": "string"}}}
#: A body of each parser with everything in it, to be spoilt in one place.
WHOLE: list[tuple[Callable[[dict[str, Any]], object], dict[str, Any]]] = [
    (
        parse_chat,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            "logit_bias": {"5": 1},
            "stop": ["x"],
            "metadata": {"a": "b"},
            "stream_options": {"include_usage": True},
            "modalities": ["text"],
            "functions": [],
            "function_call": "none",
            "chat_template_kwargs": {"a": 1},
            "reasoning_effort": "low",
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    (
        parse_chat,
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        parse_chat,
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    (
        parse_completion,
        {"model": "m", "prompt": ["x", [1, 2]], "best_of": 2, "n": 1, "logprobs": 1, "stop": "x"},
    ),
    (
        parse_anthropic,
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "x"}],
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": "y"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "x"}],
                        },
                        {
                            "type": "document",
                            "source": {"type": "text", "media_type": "text/plain", "data": "x"},
                        },
                    ],
                },
            ],
            "tools": [{"type": "custom", "name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "x"},
            "stop_sequences": ["x"],
        },
    ),
    (
        parse_anthropic,
        {
            "model": "m",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "x"}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        lambda body: responses_request(read_responses(body), ()),
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
        },
    ),
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(value: object) -> list[tuple[Any, Any]]:
    """Every container inside with each of its keys."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [p for key in keys for p in places(value[key])]


@pytest.mark.parametrize(("parse", "body"), WHOLE)
def test_a_body_is_parsed_as_it_is(
    parse: Callable[[dict[str, Any]], object], body: dict[str, Any]
) -> None:
    """So that it is the spoilt part that is refused below."""
    parse(body)


@pytest.mark.parametrize(("parse", "body"), WHOLE)
@settings(max_examples=150, derandomize=True, deadline=None)
@given(spoilt=st.data())
def test_whatever_stands_in_whatever_place_is_taken_or_refused(
    parse: Callable[[dict[str, Any]], object], body: dict[str, Any], spoilt: st.DataObject
) -> None:
    """Any other failure of a parser would be the server's."""
    body = copy.deepcopy(body)
    container, key = spoilt.draw(st.sampled_from(places(body)))
    container[key] = spoilt.draw(JSON)
    with contextlib.suppress(BadRequest):
        parse(body)
