"""Answers as `/v1/chat/completions` shows them: chunks of a stream, or one body."""

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
from mlxd.text.pieces import Delta, Piece, Reasoning, TokenText, ToolCall


@dataclass(frozen=True, slots=True)
class ChatShape:
    """One chat request's answers."""

    include_usage: bool  # in a stream; whole answers always have it

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """All choices in one body."""
        choices = [
            _choice(
                answer.ended.index,
                message=_message(answer),
                logprobs=_logprobs(answer.tokens),
                finish_reason=answer.ended.finish_reason,
            )
            for answer in answers
        ]
        return head.body("chat.completion", choices, usage=usage_body(usage))

    def stream(self, head: Head) -> ChatStream:
        """The choices in chunks."""
        return ChatStream(head, self.include_usage)


class ChatStream:
    """Of each choice the role, what it says, the reason for its end; usage if asked."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._opened: set[int] = set()
        self._calls: dict[int, int] = {}  # how many each choice has made

    def said(self, said: Said) -> list[bytes]:
        """A chunk of one choice."""
        delta = self._delta(said.index, said.piece)
        logprobs = _logprobs(said.piece.tokens)
        return [*self._opening(said.index), self._chunk(said.index, delta, logprobs=logprobs)]

    def ended(self, ended: Ended) -> list[bytes]:
        """The last chunk of one choice."""
        last = self._chunk(ended.index, {}, finish_reason=ended.finish_reason)
        return [*self._opening(ended.index), last]

    def done(self, done: Done) -> list[bytes]:
        """What follows all choices."""
        if not self._include_usage:
            return [DONE]
        body = self._head.body("chat.completion.chunk", [], usage=usage_body(done.usage))
        return [frame(to_json(body)), DONE]

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, and the end."""
        return error_frames(error)

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Delta():
                return {"content": piece.text}
            case Reasoning():
                return {"reasoning_content": piece.text}
            case ToolCall():
                number = self._calls.get(index, 0)
                self._calls[index] = number + 1
                return {"tool_calls": [{"index": number, **_call(piece)}]}

    def _opening(self, index: int) -> list[bytes]:
        if index in self._opened:
            return []
        self._opened.add(index)
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = _choice(index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return frame(to_json(self._head.body("chat.completion.chunk", [choice])))


def _choice(index: int, **fields: object) -> dict[str, Any]:
    return {"index": index, **fields}


def _message(answer: Answer) -> dict[str, Any]:
    # OpenAI's content is null only where there are calls instead.
    content = None if answer.calls and not answer.text else answer.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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
