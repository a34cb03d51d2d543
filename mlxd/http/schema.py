"""The bodies of `/v1/chat/completions` and `/v1/completions`: every field and its limits.

A body is parsed once, into a `TextRequest`. Null means absent and unknown fields
are ignored; a known one that cannot be honoured is refused, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxd.errors import BadRequest
from mlxd.http.described import ChatMessages, ChatTools, Prompts, Stops, ToolChoice
from mlxd.http.formats import ResponseFormat, only_format
from mlxd.http.messages import parse_messages
from mlxd.http.parts import (
    Effort,
    Metadata,
    Part,
    effort_kwargs,
    offered,
    stop_strings,
    validate,
)
from mlxd.http.requests import (
    BestOf,
    ChatPrompt,
    Limit,
    Prompt,
    SamplingRequest,
    TextPrompt,
    TextRequest,
    TokenPrompt,
)
from mlxd.http.toolchoice import chat_choice
from mlxd.http.tools import parse_chat_tools

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 32  # to all prompts together
MAX_COMPLETION_LOGPROBS = 5

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")
# Arguments of the rendering itself; the rest of chat_template_kwargs are the template's.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def check_template_kwargs(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the rendering itself. Raises BadRequest."""
    if reserved := _RESERVED_KWARGS & given.keys():
        raise BadRequest(
            f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}",
            param="chat_template_kwargs",
        )


def _bias_ids(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("expected an object from token id to bias")  # noqa: TRY004 - pydantic's way
    for key in value:
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"{key[:80]!r} is not a token id")
    return {int(key): bias for key, bias in value.items()}


ContextSize = Annotated[int, Field(ge=1, le=2**20)]
Bias = Annotated[float, Field(ge=-100, le=100)]
# Each is a request of its own in the model's line.
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
NoFunctions = Annotated[
    list[Any], offered(lambda functions: functions == [], "functions, the older form of tools,")
]


class StreamOptions(Part):
    """`stream_options`."""

    include_usage: bool = False


class _Body(Part):
    """The fields that chat and completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_strings), Stops] = ()
    temperature: float | None = Field(None, ge=0, le=2)  # OpenAI's range
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # further out, logits overflow
    repetition_context_size: ContextSize = 20
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    presence_context_size: ContextSize = 20
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_context_size: ContextSize = 20
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_bias_ids)] = Field(default_factory=dict)
    n: Choices = 1
    user: str | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    priority: int = Field(0, ge=0)  # of the waiting line; up to what the caller's key allows
    response_format: ResponseFormat = ResponseFormat(type="text")
    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=0.5)

    @property
    def limit(self) -> Limit | None:
        """The token limit, if the client set one."""
        return None if self.max_tokens is None else Limit(self.max_tokens, "max_tokens")

    def sampling(self, logprobs: int | None) -> SamplingRequest:
        """What the client said about sampling."""
        return SamplingRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**64,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty,
            frequency_context_size=self.frequency_context_size,
            logit_bias=self.logit_bias,
            logprobs=logprobs,
        )

    def request(self, *prompts: Prompt, logprobs: int | None) -> TextRequest:
        """The body as a request with these prompts."""
        return TextRequest(
            model=self.model,
            prompts=prompts,
            answers=self.n,
            sampling=self.sampling(logprobs),
            format=self.response_format.enforced,
            limit=self.limit,
            stops=self.stop,
            stream=self.stream,
            include_usage=self.stream_options.include_usage,
            priority=self.priority,
        )


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: ChatMessages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: ChatTools = Field(default_factory=list)
    parallel_tool_calls: bool = True
    functions: NoFunctions = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    function_call: Annotated[
        Literal["auto", "none"],
        offered(lambda call: call in ("auto", "none"), "function_call, the older form of tools,"),
    ] = "auto"
    modalities: Annotated[
        list[str], offered(lambda kinds: kinds in ([], ["text"]), "an answer other than text")
    ] = Field(default_factory=list)
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        check_template_kwargs(self.chat_template_kwargs)
        return self

    @property
    def limit(self) -> Limit | None:
        """OpenAI's newer field counts before its older name."""
        if self.max_completion_tokens is not None:
            return Limit(self.max_completion_tokens, "max_completion_tokens")
        return super().limit


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    best_of: Choices | None = None
    echo: bool = False
    suffix: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise BadRequest("log-probabilities of an echoed prompt are not offered", param="echo")
        if self.best_of is None or self.best_of == self.n:
            return self
        if self.best_of < self.n:
            raise BadRequest("best_of must be at least n", param="best_of")
        if self.stream:
            raise BadRequest("the best of several cannot be streamed", param="best_of")
        return self

    @property
    def choosing(self) -> BestOf | None:
        """How the answers to show are chosen; None = all are shown."""
        if self.best_of is None or self.best_of == self.n:
            return None
        return BestOf(self.n, show_logprobs=self.logprobs is not None)


def parse_chat(body: Mapping[str, Any]) -> TextRequest:
    """A chat request.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    parsed = validate(ChatBody, body)
    choice = chat_choice(parsed.tool_choice, parse_chat_tools(parsed.tools))
    prompt = ChatPrompt(
        messages=parse_messages(parsed.messages),
        tools=choice.tools,
        template_kwargs=effort_kwargs(parsed.reasoning_effort) | parsed.chat_template_kwargs,
        must_call=choice.required,
    )
    request = parsed.request(prompt, logprobs=parsed.top_logprobs if parsed.logprobs else None)
    return replace(
        request,
        format=only_format(request.format, choice.format),
        one_call=not parsed.parallel_tool_calls,
    )


def parse_completion(body: Mapping[str, Any]) -> TextRequest:
    """A completion request.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    parsed = validate(CompletionBody, body)
    prompts = _prompts(parsed.prompt, parsed.suffix)
    rule = parsed.choosing
    answers = parsed.n if rule is None else parsed.best_of or parsed.n
    if answers * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"at most {MAX_CHOICES} answers to all prompts together", param="prompt")
    logprobs = 0 if rule is not None and parsed.logprobs is None else parsed.logprobs
    request = parsed.request(*prompts, logprobs=logprobs)
    return replace(request, answers=answers, best_of=rule, echo=parsed.echo)


def _prompts(given: object, suffix: str) -> list[TextPrompt | TokenPrompt]:
    """One prompt, or a list of them; a list of numbers is one."""
    if isinstance(given, list) and any(isinstance(each, str | list) for each in given):
        return [_prompt(each, suffix, f"prompt[{i}]") for i, each in enumerate(given)]
    return [_prompt(given, suffix, "prompt")]


def _prompt(given: object, suffix: str, at: str) -> TextPrompt | TokenPrompt:
    if isinstance(given, str):
        return TextPrompt(given, suffix, at)
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise BadRequest(f"{at} must be a string or a list of token ids", param=at)
    if suffix:
        raise BadRequest("suffix needs a prompt of text", param="suffix")
    return TokenPrompt(tuple(given), at)
