"""Whole answers, put together from their events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxd.http.events import Ended, Said
from mlxd.http.requests import BestOf
from mlxd.text.answer import joined
from mlxd.text.pieces import Delta, Piece, Reasoning, TokenText, ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer."""

    pieces: tuple[Piece, ...]  # neighbours of one kind joined
    ended: Ended

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Delta))

    @property
    def reasoning(self) -> str:
        """What the model marked as its reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        """Its tool calls."""
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]

    @property
    def tokens(self) -> tuple[TokenText, ...]:
        """All tokens with log-probabilities, of whatever part."""
        return tuple(token for piece in self.pieces for token in piece.tokens)


def best(answers: Sequence[Answer], of: int, rule: BestOf) -> list[Answer]:
    """The best answers to each prompt, best first, numbered anew.

    Args:
        answers: to all prompts, those of one prompt side by side.
        of: how many there are to each prompt.
    """
    chosen: list[Answer] = []
    for start in range(0, len(answers), of):
        ranked = sorted(answers[start : start + of], key=_mean_logprob, reverse=True)
        chosen += ranked[: rule.kept]
    return [
        Answer(
            answer.pieces if rule.show_logprobs else _without_logprobs(answer.pieces),
            replace(answer.ended, index=index),
        )
        for index, answer in enumerate(chosen)
    ]


def _mean_logprob(answer: Answer) -> float:
    logprobs = [token.logprob for token in answer.tokens]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _without_logprobs(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple(replace(piece, tokens=()) for piece in pieces)


class Collector:
    """Keeps events until their answers are complete."""

    def __init__(self) -> None:
        self._pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        self._ended: list[Ended] = []

    def said(self, said: Said) -> None:
        """Something new of one answer."""
        self._pieces[said.index].append(said.piece)

    def ended(self, ended: Ended) -> None:
        """One answer is complete."""
        self._ended.append(ended)

    def answers(self) -> list[Answer]:
        """Those that are complete, in the order of their indices."""
        return [
            Answer(tuple(joined(self._pieces[ended.index])), ended)
            for ended in sorted(self._ended, key=lambda ended: ended.index)
        ]
