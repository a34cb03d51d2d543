"""Events as `/v1/completions` shows them: chunks of a stream, or one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxd.errors import MlxdError
from mlxd.http.body import to_json
from mlxd.http.encode import DONE, Head, error_frames, finite, usage
from mlxd.http.events import Delta, Done
from mlxd.http.sse import frame
from mlxd.text.stream import TokenText


def completion_body(head: Head, delta: Delta, done: Done) -> dict[str, Any]:
    """The whole answer; `delta` holds all of its text."""
    choice = _choice(delta, done.outcome.finish_reason)
    return head.body("text_completion", [choice], usage=usage(done.outcome))


class CompletionStream:
    """The answer in chunks: text, the reason for the end, usage if asked."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage

    def delta(self, delta: Delta) -> list[bytes]:
        """A chunk of text."""
        return [self._frame([_choice(delta, None)])]

    def done(self, done: Done) -> list[bytes]:
        """The last chunk of the choice, and what follows it."""
        frames = [self._frame([_choice(Delta(""), done.outcome.finish_reason)])]
        if self._include_usage:
            frames.append(self._frame([], usage=usage(done.outcome)))
        return [*frames, DONE]

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, and the end."""
        return error_frames(error)

    def _frame(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return frame(to_json(self._head.body("text_completion", choices, **more)))


def _choice(delta: Delta, finish_reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": delta.text,
        "logprobs": _logprobs(delta.tokens),
        "finish_reason": finish_reason,
    }


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "tokens": [_shown(token.piece) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: TokenText) -> dict[str, float]:
    """The best tokens and the chosen one, which need not be among them."""
    both = [*token.top, (token.piece, token.logprob)]
    return {_shown(piece): finite(logprob) for piece, logprob in both}


def _shown(piece: bytes) -> str:
    """Text, or as OpenAI writes a token that is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
