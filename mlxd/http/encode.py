"""What all protocols share when they write an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxd.errors import MlxdError
from mlxd.http.answers import Answer
from mlxd.http.body import to_json
from mlxd.http.envelope import error_body
from mlxd.http.events import Usage
from mlxd.http.sse import StreamEncoder, frame

DONE = frame(b"[DONE]")
# JSON has no infinity; OpenAI says this of a token that cannot be.
IMPOSSIBLE_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    prompt_tokens: int

    def body(
        self, kind: str, choices: Sequence[Mapping[str, Any]], **more: object
    ) -> dict[str, Any]:
        """An answer or a chunk, as OpenAI's older endpoints have them."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class Shape(Protocol):
    """How one request's answers are written: whole, or as a stream."""

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The whole body."""

    def stream(self, head: Head) -> StreamEncoder:
        """What writes the stream."""


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB


def error_frames(error: MlxdError) -> list[bytes]:
    """A failure after the headers: one error event, then the end."""
    return [frame(to_json(error_body(error))), DONE]
