"""What happens to a request, in order: one type for all protocols to encode.

`Admitted`; for each of its answers any number of `Said` and one `Ended`; `Done`. Or an
exception instead of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd.serving import Outcome
from mlxd.text.pieces import Piece
from mlxd.wire import Lane


@dataclass(frozen=True, slots=True)
class Admitted:
    """It has its places in its model's waiting order."""

    model: str  # its id
    lane: Lane
    reason: str
    prompt_tokens: int  # of all prompts


@dataclass(frozen=True, slots=True)
class Said:
    """Something new of one answer."""

    index: int  # of the answer
    piece: Piece


@dataclass(frozen=True, slots=True)
class Ended:
    """One answer is complete; all of it is out."""

    index: int
    finish_reason: str  # "stop" | "length" | "tool_calls"
    stop: str | None = None  # the stop string that ended it
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request, each prompt counted once."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0  # of the completion's

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], answers: int, *, reasoning_tokens: int = 0) -> Usage:
        """The sum over all answers.

        Args:
            answers: to each prompt; those of one prompt are neighbours.
            reasoning_tokens: of all of them, which only their text shows.
        """
        firsts = outcomes[::answers]
        return cls(
            sum(outcome.prompt_tokens for outcome in firsts),
            sum(outcome.cached_tokens for outcome in firsts),
            sum(outcome.completion_tokens for outcome in outcomes),
            reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Done:
    """All answers are complete."""

    usage: Usage


Event = Admitted | Said | Ended | Done
