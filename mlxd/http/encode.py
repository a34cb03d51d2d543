"""What both shapes of OpenAI's text answers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlxd.errors import MlxdError
from mlxd.http.body import to_json
from mlxd.http.envelope import error_body
from mlxd.http.sse import frame
from mlxd.serving import Outcome

DONE = frame(b"[DONE]")
# JSON has no infinity; OpenAI says this of a token that cannot be.
IMPOSSIBLE_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str

    def body(self, kind: str, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """An answer or a chunk."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def usage(outcome: Outcome) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB


def error_frames(error: MlxdError) -> list[bytes]:
    """A failure after the headers: one error event, then the end."""
    return [frame(to_json(error_body(error))), DONE]
