"""What a client may send: every refusal is 400 in the envelope and names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxd.errors import BadRequest
from mlxd.http.body import MAX_LEVELS, parse_object, to_json
from mlxd.http.envelope import error_body
from mlxd.http.requests import ChatPrompt, TextPrompt, TokenPrompt
from mlxd.http.schema import parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refusal(body: dict[str, Any]) -> BadRequest:
    """Why a body is refused, as chat or as a completion."""
    parse = parse_chat if "messages" in body else parse_completion
    with pytest.raises(BadRequest) as caught:
        parse(body)
    return caught.value


def messages_of(*messages: object) -> tuple[dict[str, Any], ...]:
    """These messages as the template will see them."""
    (prompt,) = parse_chat({"model": "m", "messages": list(messages)}).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


OUT_OF_RANGE: dict[str, list[object]] = {
    "max_tokens": [0, -1, -5, 1.5, "10", True, 1e12],
    "temperature": [-1, -0.1, 2.1, "1", True, float("inf")],
    "top_p": [0, 2, -0.5, True],
    "top_k": [-1, 1.5, True],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e-300, 1e300],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, "0"],
    "repetition_context_size": [0, -1, 1.5, 2**20 + 1, 2**63, 2**64],
    "presence_context_size": [0, 2**31],
    "frequency_context_size": [0, 2**70],
    "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
    "logit_bias": [{"AI": -100}, {"1.5": 1}, {"": 1}, {"05": 1}, [1]],
    "stop": ["", [""], ["a"] * 17, 5, [5], "x" * 1025],
    "n": [0, 33, -1, True, "1", 1.5],
    "user": [5],
    "metadata": ["x", {"a": 5}, {str(i): "x" for i in range(17)}],
    "service_tier": [5],
    "stream": [1, "true"],
    "stream_options": [True, []],
    "model": [5, True, ["m"]],
    "priority": [-1, 1.5, "1", True],
    "xtc_probability": [-0.1, 1.1, "1"],
    "xtc_threshold": [-0.1, 0.51, True],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in OUT_OF_RANGE.items() for value in values],
)
@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completions"])
def test_values_out_of_range_are_refused_by_name(
    body: dict[str, Any], field: str, value: object
) -> None:
    """On both endpoints: wrong types, booleans for numbers, values past the limits."""
    named = refusal(body | {field: value}).param
    assert named is not None
    assert named.split(".")[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_completion_tokens", 0),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("logprobs", 5),
        ("function_call", {"name": "f"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "enormous"),
        ("response_format", "text"),
        ("tools", {"type": "function"}),
        ("tools", [5]),
        ("tools", [{"type": "retrieval"}]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "f g"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("functions", [{"name": "f"}]),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"tokenize": False}),
        ("messages", "hi"),
        ("messages", []),
    ],
)
def test_chat_fields_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    """What only chat has."""
    named = refusal(CHAT | {"logprobs": True} | {field: value}).param
    assert named is not None
    assert named.split("[")[0] == field


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "banana"}, "response_format.type"),
        ({"type": None}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b"}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}},
            "response_format.json_schema.strict",
        ),
    ],
    ids=str,
)
def test_a_response_format_that_is_none_is_refused_by_the_part_that_is_wrong(
    body: dict[str, Any], value: object, named: str
) -> None:
    """On both endpoints."""
    assert refusal(body | {"response_format": value}).param == named


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 6),
        ("logprobs", True),
        ("best_of", 0),
        ("best_of", 33),
        ("echo", "yes"),
        ("suffix", 5),
        ("prompt", 5),
        ("prompt", ["a"] * 33),
        ("prompt", [True]),
        ("prompt", [["a"]]),
        ("prompt", [[1], [True]]),
        ("prompt", [1.5]),
        ("prompt", [1, "a"]),
    ],
)
def test_completion_fields_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    """What only completions have."""
    named = refusal(TEXT | {field: value}).param
    assert named is not None
    assert named.split("[")[0] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [1, 2], "suffix": "end"}, "suffix"),
        ({"prompt": ["a", "b"], "n": 17}, "prompt"),
    ],
)
def test_completion_fields_that_exclude_each_other_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    """One of the two is named."""
    assert refusal(TEXT | fields).param == param


TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
ALLOWED: dict[str, Any] = {"mode": "auto", "tools": [TOOL]}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("banana", "tool_choice"),
        (5, "tool_choice"),
        (OTHER, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED | {"mode": "odd"}}, "tool_choice"),
        (
            {"type": "allowed_tools", "allowed_tools": ALLOWED | {"tools": [5]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED | {"tools": [OTHER]}}, "tool_choice"),
    ],
)
def test_a_tool_choice_that_makes_no_sense_is_refused(choice: object, param: str) -> None:
    """Malformed, or of a tool that is not there."""
    assert refusal(CHAT | {"tools": [TOOL], "tool_choice": choice}).param == param


def test_a_call_that_must_come_needs_tools_and_leaves_no_format() -> None:
    """It would be two formats for one answer."""
    assert refusal(CHAT | {"tool_choice": "required"}).param == "tool_choice"
    asked = {"tools": [TOOL], "tool_choice": "required"}
    both = asked | {"response_format": {"type": "json_object"}}
    assert refusal(CHAT | both).param == "tool_choice"


def test_allowed_tools_are_the_only_ones_shown() -> None:
    """The others are as good as absent."""
    choice = {"type": "allowed_tools", "allowed_tools": ALLOWED}
    (prompt,) = parse_chat(CHAT | {"tools": [OTHER, TOOL], "tool_choice": choice}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["f"]


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("high", True)])
def test_an_effort_is_told_to_the_template(effort: str, thinks: bool) -> None:
    """By name, and as whether to think at all; the client's own arguments count more."""
    (prompt,) = parse_chat(CHAT | {"reasoning_effort": effort}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"reasoning_effort": effort, "enable_thinking": thinks}
    own = {"reasoning_effort": effort, "chat_template_kwargs": {"enable_thinking": not thinks}}
    (prompt,) = parse_chat(CHAT | own).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs["enable_thinking"] is not thinks


def test_top_log_probabilities_need_log_probabilities() -> None:
    """As with OpenAI; zero of them asks for nothing."""
    assert refusal(CHAT | {"top_logprobs": 5}).param == "top_logprobs"
    assert parse_chat(CHAT | {"top_logprobs": 0}).sampling.logprobs is None
    assert parse_chat(CHAT | {"top_logprobs": 0, "logprobs": True}).sampling.logprobs == 0


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    """For every field that has a default, and inside stream_options."""
    optional = ["max_tokens", "stop", "temperature", "seed", "n", "stream", "logit_bias", "tools"]
    nulls: dict[str, Any] = dict.fromkeys(optional)
    body = CHAT | nulls | {"stream_options": {"include_usage": None}, "user": "u", "zzz": [1]}
    assert parse_chat(body) == parse_chat(CHAT)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_what_is_required_may_not_be_null_or_missing(field: str) -> None:
    """The error says that it is required."""
    for body in (CHAT | {field: None}, {k: v for k, v in CHAT.items() if k != field}):
        with pytest.raises(BadRequest) as caught:
            parse_chat(body)
        assert caught.value.param == field
        assert caught.value.code == "missing_required_parameter"


def test_prompts_are_text_or_tokens() -> None:
    """Or several of them, each with its place."""
    asked = parse_completion(TEXT | {"prompt": ["hi", "ho"]})
    assert asked.prompts == (
        TextPrompt("hi", param="prompt[0]"),
        TextPrompt("ho", param="prompt[1]"),
    )
    assert parse_completion(TEXT | {"prompt": [5, 6]}).prompts == (TokenPrompt((5, 6)),)
    mixed = parse_completion(TEXT | {"prompt": [[5, 6], "hi"]})
    assert mixed.prompts[0] == TokenPrompt((5, 6), "prompt[0]")


def test_content_parts_of_every_role_are_joined() -> None:
    """Text parts in order; the newer name of the system's role becomes the older."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    roles = ["system", "developer", "user", "assistant", "tool"]
    found = messages_of(*({"role": role, "content": parts} for role in roles))
    assert [message["content"] for message in found] == ["ab"] * 5
    assert [message["role"] for message in found] == ["system", "system", *roles[2:]]


def test_tool_calls_reach_the_template_with_their_arguments_as_objects() -> None:
    """Arguments that a model broke stay the text that they are."""
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in enumerate(['{"a": 1}', '{"a": ', ""])
    ]
    (message,) = messages_of({"role": "assistant", "content": None, "tool_calls": calls})
    assert message["content"] == ""
    given = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert given == [{"a": 1}, '{"a": ', {}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "odd"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_a_message_that_cannot_be_used_is_named(message: object, param: str) -> None:
    """Down to the part of it."""
    assert refusal({"model": "m", "messages": [message]}).param == param


def test_image_parts_have_a_code_of_their_own() -> None:
    """Clients can tell that the model is the reason."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    error = refusal({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert error.code == "images_not_supported"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud83d"}',
        b'{"\\ud83d": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_a_body_that_is_not_one_plain_json_object_is_refused(data: bytes) -> None:
    """Each parser would read it in its own way, or not at all."""
    with pytest.raises(BadRequest):
        parse_object(data)


@pytest.mark.parametrize("number", [b"1e999", b"-1e400", b"9" * 400 + b".5", b"9" * 5000])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": %s}', "temperature"),
        (b'{"messages": [{"content": []}, {"x": [1, {"y": %s}]}]}', "messages[1].x[1].y"),
        (
            b'{"response_format": {"json_schema": {"schema": {"maximum": %s}}}}',
            "response_format.json_schema.schema.maximum",
        ),
    ],
    ids=["field", "message", "schema"],
)
def test_numbers_beyond_a_float_are_refused_by_name(number: bytes, body: bytes, param: str) -> None:
    """They would be infinite here, and something else elsewhere."""
    with pytest.raises(BadRequest) as caught:
        parse_object(body % number)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "data",
    [b'{"\\ud83d": 1, "\\ud83d": 2}', b'{"a": 1e999, "b": ' + b"[" * 5000, b'{"a": 1e999,}'],
    ids=["twice half a surrogate pair", "and too deep", "and not JSON"],
)
def test_what_is_wrong_in_two_ways_is_refused_in_words_that_can_be_sent(data: bytes) -> None:
    """An error is an answer, too."""
    with pytest.raises(BadRequest) as caught:
        parse_object(data)
    to_json(error_body(caught.value))


def test_a_body_is_nested_as_deep_as_its_readers_can_follow() -> None:
    """Templates, schemas and JSON again are recursive."""

    def nested(levels: int) -> bytes:
        return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    assert parse_object(nested(MAX_LEVELS))
    with pytest.raises(BadRequest, match="levels deep"):
        parse_object(nested(MAX_LEVELS + 1))
    deep = json.dumps({"a": json.loads(nested(MAX_LEVELS))})
    calls = [{"function": {"name": "f", "arguments": deep}}]
    (message,) = messages_of({"role": "assistant", "tool_calls": calls})
    assert message["tool_calls"][0]["function"]["arguments"] == deep, "the text that it was"
