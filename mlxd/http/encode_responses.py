"""Answers as `/v1/responses` shows them: a list of items, whole or event by event."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxd.errors import MlxdError
from mlxd.http.answers import Answer
from mlxd.http.body import to_json
from mlxd.http.encode import Head, finite
from mlxd.http.events import Done, Ended, Said, Usage
from mlxd.http.responses_schema import ResponsesBody
from mlxd.http.sse import named_frame
from mlxd.text.pieces import Delta, Piece, Reasoning, TokenText, ToolCall

#: An event's type and what it says.
Told = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ResponsesShape:
    """One request's response. There is only ever one answer.

    Args:
        keep: is given the whole response when it is complete.
    """

    asked: ResponsesBody
    keep: Callable[[dict[str, Any]], None]

    def whole(self, head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The response in one body."""
        (answer,) = answers
        output = Output()
        for piece in answer.pieces:
            output.say(piece)
        output.close(complete=answer.ended.finish_reason != "length")
        body = response_body(head, self.asked, output.items, answer.ended, usage)
        self.keep(body)
        return body

    def stream(self, head: Head) -> ResponsesStream:
        """The response in events."""
        return ResponsesStream(head, self)


class ResponsesStream:
    """`response.created`, the items with their parts and deltas, `response.completed`."""

    def __init__(self, head: Head, shape: ResponsesShape) -> None:
        self._head = head
        self._shape = shape
        self._output = Output()
        self._number = 0  # of the next event
        self._ended: Ended | None = None

    def said(self, said: Said) -> list[bytes]:
        """What is new, in the open item or in one of its own."""
        return self._frames([*self._opening(), *self._output.say(said.piece)])

    def ended(self, ended: Ended) -> list[bytes]:
        """The last item is done; the response is when its usage is known."""
        self._ended = ended
        closing = self._output.close(complete=ended.finish_reason != "length")
        return self._frames([*self._opening(), *closing])

    def done(self, done: Done) -> list[bytes]:
        """The whole response, and the end."""
        body = self._body(self._ended, done.usage)
        self._shape.keep(body)
        return self._frames([(f"response.{body['status']}", {"response": body})])

    def error(self, error: MlxdError) -> list[bytes]:
        """A failure, after which nothing comes."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._frames([("error", fields)])

    def _opening(self) -> Iterator[Told]:
        if self._number == 0:
            body = self._body(None, None)
            yield "response.created", {"response": body}
            yield "response.in_progress", {"response": body}

    def _body(self, ended: Ended | None, usage: Usage | None) -> dict[str, Any]:
        return response_body(self._head, self._shape.asked, self._output.items, ended, usage)

    def _frames(self, events: Sequence[Told]) -> list[bytes]:
        frames: list[bytes] = []
        for name, fields in events:
            event = {"type": name, "sequence_number": self._number, **fields}
            frames.append(named_frame(name, to_json(event)))
            self._number += 1
        return frames


class Output:
    """The items so far; each step tells the events that a stream shows of it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: type[Piece] | None = None  # the kind of the last item, while more may come
        self._text = ""
        self._tokens: list[dict[str, Any]] = []

    def say(self, piece: Piece) -> list[Told]:
        """Something new, in the open item or in one of its own."""
        if isinstance(piece, ToolCall):
            return [*self.close(complete=True), *self._call(piece)]
        told: list[Told] = []
        if type(piece) is not self._open:
            told = [*self.close(complete=True), *self._begin(type(piece))]
        self._text += piece.text
        if isinstance(piece, Reasoning):
            return [*told, ("response.reasoning_text.delta", self._at(delta=piece.text))]
        tokens = _logprobs(piece.tokens)
        self._tokens += tokens
        delta = self._at(delta=piece.text, logprobs=tokens)
        return [*told, ("response.output_text.delta", delta)]

    def close(self, *, complete: bool) -> list[Told]:
        """Nothing more comes of the open item.

        Args:
            complete: else the limit cut it, or the call that would have followed.
        """
        if self._open is None:
            return []
        part = self._part()
        done = {"text": self._text}
        if self._open is Delta:
            done["logprobs"] = part["logprobs"]
        kind = "reasoning_text" if self._open is Reasoning else "output_text"
        told: list[Told] = [
            (f"response.{kind}.done", self._at(**done)),
            ("response.content_part.done", self._at(part=part)),
        ]
        item = self.items[-1]
        item |= {"content": [part], "status": "completed" if complete else "incomplete"}
        self._open, self._text, self._tokens = None, "", []
        return [*told, ("response.output_item.done", self._item(item))]

    def _begin(self, kind: type[Piece]) -> list[Told]:
        self._open = kind
        if kind is Reasoning:
            item = {"id": _id("rs"), "type": "reasoning", "summary": []}
        else:
            item = {"id": _id("msg"), "type": "message", "role": "assistant"}
        self.items.append(item | {"content": [], "status": "in_progress"})
        return [
            ("response.output_item.added", self._item(dict(self.items[-1]))),
            ("response.content_part.added", self._at(part=self._part())),
        ]

    def _call(self, call: ToolCall) -> list[Told]:
        item = {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append(item | {"arguments": call.arguments, "status": "completed"})
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        opened = item | {"arguments": "", "status": "in_progress"}
        done = where | {"name": call.name, "arguments": call.arguments}
        return [
            ("response.output_item.added", self._item(opened)),
            ("response.function_call_arguments.delta", where | {"delta": call.arguments}),
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", self._item(self.items[-1])),
        ]

    def _part(self) -> dict[str, Any]:
        if self._open is Reasoning:
            return {"type": "reasoning_text", "text": self._text}
        text: dict[str, Any] = {"type": "output_text", "text": self._text, "annotations": []}
        return text | {"logprobs": list(self._tokens)}

    def _at(self, **fields: object) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0, **fields}

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item": item}


def response_body(
    head: Head,
    asked: ResponsesBody,
    output: Sequence[dict[str, Any]],
    ended: Ended | None,
    usage: Usage | None,
) -> dict[str, Any]:
    """A response object; None = its answer has not ended yet."""
    cut = ended is not None and ended.finish_reason == "length"
    status = "in_progress" if ended is None else "incomplete" if cut else "completed"
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": head.model,
        "output": list(output),
        "usage": None if usage is None else _usage(usage),
        **_repeated(asked),
    }


def _repeated(asked: ResponsesBody) -> dict[str, Any]:
    """What a response says of its request."""
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "store": asked.store,
        "temperature": asked.temperature,
        "text": {"format": asked.text.format.repeated()},
        "tool_choice": asked.tool_choice,
        "tools": asked.tools,
        "top_logprobs": asked.top_logprobs,
        "top_p": asked.top_p,
        "truncation": asked.truncation,
        "user": asked.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprobs(tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
    return [
        _entry(token.piece, token.logprob)
        | {"top_logprobs": [_entry(piece, logprob) for piece, logprob in token.top]}
        for token in tokens
    ]


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
