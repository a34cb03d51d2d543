"""One answer: generated tokens in, the pieces that a client may see out.

Pure and synchronous, as the `TextStream` inside it, and used where that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mlxd.text.pieces import Delta, Piece, Reasoning, TokenText, ToolCall
from mlxd.text.stream import TextStream
from mlxd.wire import Token


class Apart(Protocol):
    """What takes an answer's text apart: `Parts`, or `BareCalls` around them."""

    @property
    def reasons(self) -> bool:
        """Whether the text is in its reasoning now."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Add text; the pieces that it completes."""
        ...

    def finish(self, *, cut: bool) -> list[Piece]:
        """The text is over, by itself or cut."""
        ...


class AnswerStream:
    """Text and its stop strings first, then the parts that the model marked in it.

    However its tokens are batched, the pieces join to the same answer.
    """

    def __init__(self, text: TextStream, parts: Apart | None, *, one_call: bool = False) -> None:
        """
        Args:
            parts: None where the model marks nothing; then all text is content.
            one_call: end after the first tool call.
        """
        self._text = text
        self._parts = parts
        self._one_call = one_call
        self._shown: tuple[TokenText, ...] = ()  # of text that is in no piece yet
        self._count = 0  # tokens taken
        self._called_at: int | None = None  # with `one_call`
        self.has_called = False
        self.reasoning_tokens = 0  # tokens of the reasoning, its markers included

    @property
    def ended_at(self) -> int | None:
        """Count of tokens where the text ended by itself: at a stop string, or its only call."""
        stopped = self._text.stopped_at
        return self._called_at if stopped is None else stopped

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._text.stop

    def feed(self, tokens: Sequence[Token]) -> list[Piece]:
        """Take tokens in order; after the end there is nothing more."""
        pieces: list[Piece] = []
        for token in tokens:
            if self.ended_at is not None:
                break
            self._count += 1
            began_reasoning = self._reasons
            pieces += self._pieces(self._text.feed([token]))
            self.reasoning_tokens += began_reasoning or self._reasons
            if self._one_call and self.has_called:
                self._called_at = self._count
        return joined(pieces)

    def finish(self, *, cut: bool) -> list[Piece]:
        """The row has ended: what was held goes out.

        Args:
            cut: the row's end was not the model's own; a stop string still counts as one.
        """
        if self._called_at is not None:
            return []
        pieces = self._pieces(self._text.finish())
        if self._parts is not None:
            stopped = self._text.stopped_at is not None
            pieces += self._noted(self._parts.finish(cut=cut and not stopped))
        if self._shown:
            pieces.append(Delta("", self._shown))
        return joined(pieces)

    @property
    def _reasons(self) -> bool:
        return self._parts is not None and self._parts.reasons

    def _pieces(self, delta: Delta) -> list[Piece]:
        if self._parts is None:
            return [delta] if delta else []
        self._shown += delta.tokens
        pieces = self._noted(self._parts.push(delta.text))
        if pieces and self._shown:
            pieces[-1] = replace(pieces[-1], tokens=self._shown)
            self._shown = ()
        return pieces

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        """Note whether there was a call; with `one_call` nothing follows it."""
        for index, piece in enumerate(pieces):
            if isinstance(piece, ToolCall):
                only = self._one_call and not self.has_called
                self.has_called = True
                return pieces[: index + 1] if only else pieces
        return pieces


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same, with neighbours of one kind as one; calls stay apart."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, ToolCall) or type(last) is not type(piece):
            result.append(piece)
        elif isinstance(last, Delta | Reasoning):
            text, tokens = last.text + piece.text, last.tokens + piece.tokens
            result[-1] = replace(last, text=text, tokens=tokens)
    return result
