"""Answers as `/v1/messages` shows them: blocks of one message, whole or event by event."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxd.errors import MlxdError
from mlxd.http.answers import Answer
from mlxd.http.body import to_json
from mlxd.http.encode import Head
from mlxd.http.envelope import anthropic_error_body
from mlxd.http.events import Done, Ended, Said, Usage
from mlxd.http.sse import named_frame
from mlxd.text.answer import joined
from mlxd.text.pieces import Delta, Piece, Reasoning, ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

#: What a message has of the model's reasoning: no block, one without its text, or all of it.
Shown = Literal["nothing", "signature", "text"]


@dataclass(frozen=True, slots=True)
class AnthropicShape:
    """One request's message. There is only ever one answer."""

    reasoning: Shown

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The message in one body."""
        (answer,) = answers
        shown = joined([each for each in answer.pieces if _is_shown(each, self.reasoning)])
        content = [_whole_block(piece, self.reasoning) for piece in shown]
        return _message(head, content) | _stop(answer.ended) | {"usage": _usage(usage)}

    def stream(self, head: Head) -> AnthropicStream:
        """The message in events."""
        return AnthropicStream(head, self.reasoning)


class AnthropicStream:
    """`message_start`; of each block its start, deltas and stop; `message_delta`, `message_stop`.

    Blocks follow each other: one begins where the kind of what is said changes.
    """

    def __init__(self, head: Head, reasoning: Shown) -> None:
        self._head = head
        self._reasoning = reasoning
        self._started = False
        self._blocks = 0
        self._open: type[Piece] | None = None  # the kind of the open block
        self._thought = ""  # the text of an open thinking block
        self._ended: Ended | None = None

    def said(self, said: Said) -> list[bytes]:
        """What is new, in the open block or in one of its own."""
        piece = said.piece
        frames = self._opening()
        if not _is_shown(piece, self._reasoning):
            return frames
        if isinstance(piece, ToolCall) or type(piece) is not self._open:
            frames += self._close()
            frames.append(self._event("content_block_start", content_block=_empty_block(piece)))
            self._open = type(piece)
        match piece:
            case Delta():
                return [*frames, self._delta(type="text_delta", text=piece.text)]
            case Reasoning():
                self._thought += piece.text
                if self._reasoning == "signature":
                    return frames
                return [*frames, self._delta(type="thinking_delta", thinking=piece.text)]
            case ToolCall():
                delta = self._delta(type="input_json_delta", partial_json=piece.arguments)
                return [*frames, delta, *self._close()]

    def ended(self, ended: Ended) -> list[bytes]:
        """The last block stops; the message does when its usage is known."""
        self._ended = ended
        return [*self._opening(), *self._close()]

    def done(self, done: Done) -> list[bytes]:
        """The reason and the usage, and the end."""
        stop = {} if self._ended is None else _stop(self._ended)
        return [
            _named("message_delta", delta=stop, usage=_usage(done.usage)),
            _named("message_stop"),
        ]

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, after which nothing comes."""
        return [named_frame("error", to_json(anthropic_error_body(error)))]

    def _opening(self) -> list[bytes]:
        if self._started:
            return []
        self._started = True
        usage = Usage(self._head.prompt_tokens, 0, 0)
        message = _message(self._head, []) | {
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        return [_named("message_start", message=message)]

    def _close(self) -> list[bytes]:
        """Stop the open block; a thinking one is signed before."""
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open is Reasoning:
            frames.append(self._delta(type="signature_delta", signature=_signature(self._thought)))
        frames.append(self._event("content_block_stop"))
        self._open, self._thought = None, ""
        self._blocks += 1
        return frames

    def _delta(self, **delta: str) -> bytes:
        return self._event("content_block_delta", delta=delta)

    def _event(self, name: str, **fields: object) -> bytes:
        return _named(name, index=self._blocks, **fields)


def _named(name: str, **fields: object) -> bytes:
    return named_frame(name, to_json({"type": name, **fields}))


def _message(head: Head, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
    }


def _stop(ended: Ended) -> dict[str, Any]:
    reason = _STOP_REASONS[ended.finish_reason]
    if ended.finish_reason == "stop" and ended.stop is not None:
        reason = "stop_sequence"
    sequence = ended.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic's input tokens are those that were not read from a cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _is_shown(piece: Piece, reasoning: Shown) -> bool:
    if isinstance(piece, Reasoning) and reasoning == "nothing":
        return False
    return isinstance(piece, ToolCall) or piece.text != ""


def _whole_block(piece: Piece, reasoning: Shown) -> dict[str, Any]:
    match piece:
        case Delta():
            return {"type": "text", "text": piece.text}
        case Reasoning():
            signature = _signature(piece.text)
            text = piece.text if reasoning == "text" else ""
            return {"type": "thinking", "thinking": text, "signature": signature}
        case ToolCall():
            return _empty_block(piece) | {"input": json.loads(piece.arguments)}


def _empty_block(piece: Piece) -> dict[str, Any]:
    match piece:
        case Delta():
            return {"type": "text", "text": ""}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCall():
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


def _signature(thinking: str) -> str:
    """Clients keep a thinking block only with one, and send it back; nothing here checks it."""
    return hashlib.sha256(thinking.encode()).hexdigest()
