"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`: every field and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxd.errors import BadRequest
from mlxd.http.anthropic_messages import parse_anthropic_messages
from mlxd.http.described import AnthropicMessages, AnthropicSystem, AnthropicTools, Stops
from mlxd.http.encode_anthropic import Shown
from mlxd.http.formats import OutputFormat, only_format
from mlxd.http.parts import Part, stop_strings, validate
from mlxd.http.requests import ChatPrompt, JsonFormat, Limit, SamplingRequest, TextRequest
from mlxd.http.toolchoice import Choice, anthropic_choice
from mlxd.http.tools import Function, all_tools, parse_function


class Metadata(Part):
    """`metadata`."""

    user_id: str | None = Field(None, max_length=512)


class Thinking(Part):
    """`thinking`. A budget is a hint that no model here takes; the token limit counts."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def shown(self) -> Shown:
        """What a message says of the model's reasoning: nothing, unless it was asked for."""
        if self.type == "disabled":
            return "nothing"
        return "signature" if self.display == "omitted" else "text"


class ToolChoice(Part):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None  # of the tool
    disable_parallel_tool_use: bool = False


class OutputConfig(Part):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Part):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    model: str
    messages: AnthropicMessages
    system: AnthropicSystem = None
    tools: AnthropicTools = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()

    def prompt(self) -> ChatPrompt:
        """The conversation in the form that chat templates take.

        Raises:
            BadRequest: naming the part that cannot be used.
        """
        messages, continues = parse_anthropic_messages(self.messages, self.system)
        choice = self.choice()
        kwargs: dict[str, Any] = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config.effort is not None:
            kwargs["reasoning_effort"] = self.output_config.effort
        return ChatPrompt(
            messages=messages,
            tools=choice.tools,
            template_kwargs=kwargs,
            continues=continues,
            must_call=choice.required,
        )

    def choice(self) -> Choice:
        """The tools that may be called. Raises BadRequest."""
        asked = self.tool_choice
        return anthropic_choice(asked.type, asked.name, _tools(self.tools))


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[tuple[str, ...], BeforeValidator(stop_strings), Stops] = ()
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def format(self) -> JsonFormat | None:
        """What the answer has to be, apart from a call; None = any text."""
        asked = self.output_config.format
        return None if asked is None else asked.enforced

    def request(self) -> TextRequest:
        """The body as a request.

        Raises:
            BadRequest: naming the part that cannot be used.
        """
        return TextRequest(
            model=self.model,
            prompts=(self.prompt(),),
            sampling=SamplingRequest(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
            ),
            format=only_format(self.format(), self.choice().format),
            limit=Limit(self.max_tokens, "max_tokens"),
            stops=self.stop_sequences,
            stream=self.stream,
            one_call=self.tool_choice.disable_parallel_tool_use,
        )


def parse_anthropic(body: Mapping[str, Any]) -> tuple[TextRequest, Shown]:
    """A request for a message, and what it shows of the model's reasoning.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    parsed = validate(MessagesBody, body)
    return parsed.request(), parsed.thinking.shown


def parse_count(body: Mapping[str, Any]) -> tuple[str, ChatPrompt]:
    """Which model's tokens of which prompt are to be counted.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    parsed = validate(CountBody, body)
    return parsed.model, parsed.prompt()


def _tools(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind != "custom":
            raise BadRequest(
                f"{at}.type must be 'custom': tools that a server runs are not offered",
                param=f"{at}.type",
            )
        functions.append(parse_function(tool, at, parameters="input_schema"))
    return all_tools(functions)
