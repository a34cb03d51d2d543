"""The body of `/v1/responses`: every field and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mlxd.errors import BadRequest
from mlxd.http.described import ResponsesInput, ResponsesTools, ToolChoice
from mlxd.http.formats import TextFormat, only_format
from mlxd.http.parts import Effort, Metadata, Part, effort_kwargs, offered, validate
from mlxd.http.requests import ChatPrompt, Limit, SamplingRequest, TextRequest
from mlxd.http.responses_input import parse_input
from mlxd.http.schema import MAX_TOP_LOGPROBS
from mlxd.http.toolchoice import responses_choice
from mlxd.http.tools import Function, all_tools, parse_function

LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(Part):
    """`reasoning`; a summary is never made, as the reasoning itself is shown."""

    effort: Effort | None = None


class TextOptions(Part):
    """`text`."""

    format: TextFormat = TextFormat(type="text")


class ResponsesBody(Part):
    """`POST /v1/responses`."""

    model: str
    input: ResponsesInput
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    include: Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    tools: ResponsesTools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    truncation: Annotated[
        Literal["disabled"], offered(lambda how: how != "auto", "cutting the input")
    ] = "disabled"
    background: Annotated[bool, offered(lambda on: on is not True, "background work")] = False
    conversation: Annotated[
        None, offered(lambda found: found is None, "a conversation that is kept here")
    ] = None
    prompt: Annotated[None, offered(lambda found: found is None, "a stored prompt")] = None
    metadata: Metadata = Field(default_factory=dict)
    user: str | None = None
    service_tier: str | None = None
    priority: int = Field(0, ge=0)  # of the waiting line; up to what the caller's key allows

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise BadRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        return self

    @property
    def logprobs(self) -> int | None:
        """How many log-probabilities beside a token's own; None = none at all."""
        return self.top_logprobs if LOGPROBS in self.include else None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request, what it adds to its conversation, and what its response repeats."""

    request: TextRequest
    conversation: tuple[dict[str, Any], ...]  # with the input, without the instructions
    body: ResponsesBody


def read_responses(body: Mapping[str, Any]) -> ResponsesBody:
    """The body, checked as far as it can be without its conversation.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    return validate(ResponsesBody, body)


def responses_request(body: ResponsesBody, before: tuple[dict[str, Any], ...]) -> ResponsesRequest:
    """The whole request.

    Args:
        before: the conversation that `previous_response_id` names.

    Raises:
        BadRequest: naming the part of the input that cannot be used.
    """
    conversation = (*before, *parse_input(body.input))
    # Instructions are of one response: an earlier one's are not kept.
    system = () if body.instructions is None else (_system(body.instructions),)
    choice = responses_choice(body.tool_choice, _tools(body.tools))
    request = TextRequest(
        model=body.model,
        prompts=(
            ChatPrompt(
                messages=(*system, *conversation),
                tools=choice.tools,
                template_kwargs=effort_kwargs(body.reasoning.effort),
                must_call=choice.required,
                param="input",
            ),
        ),
        sampling=SamplingRequest(
            temperature=body.temperature, top_p=body.top_p, logprobs=body.logprobs
        ),
        limit=None
        if body.max_output_tokens is None
        else Limit(body.max_output_tokens, "max_output_tokens"),
        format=only_format(body.text.format.enforced, choice.format),
        stops=(),
        stream=body.stream,
        priority=body.priority,
        one_call=not body.parallel_tool_calls,
    )
    return ResponsesRequest(request, conversation, body)


def _system(instructions: str) -> dict[str, Any]:
    return {"role": "system", "content": instructions}


def _tools(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise BadRequest(
                f"{at}.type must be 'function': tools that a server runs are not offered",
                param=f"{at}.type",
            )
        functions.append(parse_function(tool, at))
    return all_tools(functions)
