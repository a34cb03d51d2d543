"""Answers as `/v1/completions` shows them: chunks of a stream, or one body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxd.errors import MlxdError
from mlxd.http.answers import Answer
from mlxd.http.body import to_json
from mlxd.http.encode import DONE, Head, error_frames, finite, usage_body
from mlxd.http.events import Done, Ended, Said, Usage
from mlxd.http.sse import frame
from mlxd.text.pieces import Delta, TokenText


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """One completion request's answers."""

    include_usage: bool  # in a stream; whole answers always have it

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """All choices in one body."""
        choices = [
            _choice(answer.ended.index, answer.text, answer.tokens, answer.ended.finish_reason)
            for answer in answers
        ]
        return head.body("text_completion", choices, usage=usage_body(usage))

    def stream(self, head: Head) -> CompletionStream:
        """The choices in chunks."""
        return CompletionStream(head, self.include_usage)


class CompletionStream:
    """Of each choice its text, and the reason for its end; usage if asked."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage

    def said(self, said: Said) -> list[bytes]:
        """A chunk of text; completions have no other parts."""
        text = said.piece.text if isinstance(said.piece, Delta) else ""
        return [self._frame([_choice(said.index, text, said.piece.tokens, None)])]

    def ended(self, ended: Ended) -> list[bytes]:
        """The last chunk of one choice."""
        return [self._frame([_choice(ended.index, "", (), ended.finish_reason)])]

    def done(self, done: Done) -> list[bytes]:
        """What follows all choices."""
        if not self._include_usage:
            return [DONE]
        return [self._frame([], usage=usage_body(done.usage)), DONE]

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, and the end."""
        return error_frames(error)

    def _frame(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return frame(to_json(self._head.body("text_completion", choices, **more)))


def _choice(
    index: int, text: str, tokens: Sequence[TokenText], finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(tokens),
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
