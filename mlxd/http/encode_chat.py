"""Events as `/v1/chat/completions` shows them: chunks of a stream, or one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxd.errors import MlxdError
from mlxd.http.body import to_json
from mlxd.http.encode import DONE, Head, error_frames, finite, usage
from mlxd.http.events import Delta, Done
from mlxd.http.sse import frame
from mlxd.text.stream import TokenText


def chat_body(head: Head, delta: Delta, done: Done) -> dict[str, Any]:
    """The whole answer; `delta` holds all of its text."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": _logprobs(delta.tokens),
        "finish_reason": done.outcome.finish_reason,
    }
    return head.body("chat.completion", [choice], usage=usage(done.outcome))


class ChatStream:
    """The answer in chunks: the role, text, the reason for the end, usage if asked."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._opened = False

    def delta(self, delta: Delta) -> list[bytes]:
        """A chunk of text."""
        chunk = self._chunk({"content": delta.text}, logprobs=_logprobs(delta.tokens))
        return [*self._opening(), chunk]

    def done(self, done: Done) -> list[bytes]:
        """The last chunk of the choice, and what follows it."""
        frames = [*self._opening(), self._chunk({}, finish_reason=done.outcome.finish_reason)]
        if self._include_usage:
            body = self._head.body("chat.completion.chunk", [], usage=usage(done.outcome))
            frames.append(frame(to_json(body)))
        return [*frames, DONE]

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, and the end."""
        return error_frames(error)

    def _opening(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        return [self._chunk({"role": "assistant", "content": ""})]

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return frame(to_json(self._head.body("chat.completion.chunk", [choice])))


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        _entry(token.piece, token.logprob)
        | {"top_logprobs": [_entry(piece, logprob) for piece, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }
