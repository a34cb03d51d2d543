"""Generation requests after parsing: frozen, in range, free of any protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for the model's chat template."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False  # the answer goes on with the last message, the assistant's
    must_call: bool = False  # the answer is a call of a tool, in JSON
    param: str = "messages"

    @property
    def characters(self) -> int:
        """Length of the text that the template is given, at least."""
        contents = (message.get("content") for message in self.messages)
        return sum(len(content) for content in contents if isinstance(content, str))


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to go on from, or with a suffix a gap to fill."""

    text: str
    suffix: str = ""
    param: str = "prompt"

    @property
    def characters(self) -> int:
        """Length of the text."""
        return len(self.text) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to go on from; not yet checked against a vocabulary."""

    tokens: tuple[int, ...]
    param: str = "prompt"


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Limit:
    """The token limit that a client set, and the field it used."""

    tokens: int
    param: str


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What the client said about sampling; None = its model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None = none; 0 = of the chosen token; k = of the k best too


@dataclass(frozen=True, slots=True)
class BestOf:
    """Show only the answers with the highest mean log-probability of their tokens."""

    kept: int  # for each prompt
    show_logprobs: bool  # else they were computed for the choice alone


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer must be JSON of this schema, which is not yet checked."""

    schema: Mapping[str, Any]
    param: str


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request for text, whichever protocol it came by."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingRequest
    limit: Limit | None
    stops: tuple[str, ...]
    stream: bool
    format: JsonFormat | None = None  # None = any text
    include_usage: bool = False  # in a stream, at its end
    priority: int = 0  # higher first
    answers: int = 1  # generated for each prompt
    best_of: BestOf | None = None  # which of them are shown; None = all
    echo: bool = False  # answers begin with their prompt
    one_call: bool = False  # an answer ends after its first tool call
