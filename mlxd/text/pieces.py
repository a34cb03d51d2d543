"""What an answer is made of, in the order in which it becomes visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as its client asked to see it, with log-probabilities."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]  # best first
    offset: int  # of its text in the whole text, in characters


@dataclass(frozen=True, slots=True)
class Delta:
    """What became visible: text, and the tokens that begin in what is visible."""

    text: str
    tokens: tuple[TokenText, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)

    @classmethod
    def joined(cls, deltas: Sequence[Delta]) -> Delta:
        """Several, in order, as one."""
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.tokens),
        )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model marked as its reasoning."""

    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call of a tool."""

    id: str
    name: str
    arguments: str  # a JSON object
    tokens: tuple[TokenText, ...] = ()


#: Of an answer. A `Delta` is of its content, what the client shows.
Piece = Delta | Reasoning | ToolCall
