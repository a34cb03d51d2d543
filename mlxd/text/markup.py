"""How a model marks its reasoning and its tool calls, and an answer taken apart by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxd.text.calls import NoCall, ToolParser, parse_calls
from mlxd.text.pieces import Delta, Piece, Reasoning

#: The machine's names for where an answer is; all of its other states are markup.
CONTENT = "normal"
REASONING = "reasoning"
CALL = "tool"


class Machine(Protocol):
    """mlx-lm's `TextStateMachine`: finds markers in a growing text, whatever its cuts."""

    def make_state(self, initial: str) -> Any:  # noqa: ANN401 - opaque
        """A fresh state; where the text begins."""

    def split(self, state: Any, text: str) -> tuple[Any, list[tuple[str, str]]]:  # noqa: ANN401
        """The next state, and the text of the present part and of each that a marker opens."""

    def flush(self, state: Any) -> tuple[Any, str, str]:  # noqa: ANN401
        """At the end: the next state, the text held as a possible marker, its part."""


@dataclass(frozen=True, slots=True)
class Markup:
    """What a model's tokenizer says about its answers. Stateless: shared by all requests."""

    #: Finds reasoning alone, for requests without tools; None = the model marks none.
    reasoning: Machine | None = None
    #: Finds reasoning and calls; None = the model's calls cannot be told from its text.
    calls: Machine | None = None
    parser: ToolParser | None = None
    #: Whether the chat template shows the tools to the model.
    takes_tools: bool = False
    #: The part in which an answer to these prompt tokens begins; costs a search of them.
    opening: Callable[[Sequence[int]], str] | None = None
    #: The tokens that end the reasoning; none = it has no such end.
    reasoning_end: tuple[int, ...] = ()

    def machine(self, *, with_calls: bool) -> Machine | None:
        """What takes an answer apart; None = all of it is content."""
        return self.calls if with_calls and self.calls is not None else self.reasoning


class Parts:
    """One answer, taken apart: text in, pieces out.

    Line breaks beside a marker belong to it, as chat templates write them. A call is
    parsed when it is complete, and shown as one piece; what is no call is content.
    """

    def __init__(
        self, markup: Markup, machine: Machine, tools: Sequence[Mapping[str, Any]], opening: str
    ) -> None:
        """
        Args:
            tools: of the request, as clients send them.
            opening: the part in which the answer begins, see `Markup.opening`.
        """
        self._markup = markup
        self._machine = machine
        self._tools = tools
        self._state = machine.make_state(opening)
        self._part = opening
        self._call = ""  # text of the call that is not complete yet
        self._breaks = ""  # line breaks that stand before what comes next
        self._after_marker = opening != CONTENT

    @property
    def reasons(self) -> bool:
        """Whether the text is in its reasoning now."""
        return self._part == REASONING

    def push(self, text: str) -> list[Piece]:
        """Add text; the pieces that it completes."""
        self._state, segments = self._machine.split(self._state, text)
        return self._take(segments)

    def finish(self, *, cut: bool) -> list[Piece]:
        """The text is over.

        Args:
            cut: not by the model itself, so that an open call is not complete.
        """
        self._state, held, part = self._machine.flush(self._state)
        pieces = self._take([(part, held)])
        if self._part == CALL:
            pieces += self._as_content() if cut else self._parsed()
        elif self._breaks and self._part == CONTENT:
            pieces.append(Delta(self._breaks))
        return pieces

    def _take(self, segments: Sequence[tuple[str, str]]) -> list[Piece]:
        (_, first), *others = segments
        pieces = self._said(first)
        for part, text in others:
            pieces += self._passed(part)
            pieces += self._said(text)
        return pieces

    def _passed(self, part: str) -> list[Piece]:
        """A marker ended the present part and begins this one."""
        pieces = self._parsed() if self._part == CALL else []
        if part != CALL:
            # Those before a call are kept until it proves to be one.
            self._breaks = ""
        self._part = part
        self._after_marker = not any(isinstance(piece, Delta) for piece in pieces)
        return pieces

    def _said(self, text: str) -> list[Piece]:
        if self._part == CALL:
            self._call += text
            return []
        if self._part not in {CONTENT, REASONING}:
            return []
        if self._after_marker:
            text = text.lstrip("\n")
        if not text:
            return []
        self._after_marker = False
        text = self._breaks + text
        shown = text.rstrip("\n")
        self._breaks = text[len(shown) :]
        if not shown:
            return []
        return [Delta(shown) if self._part == CONTENT else Reasoning(shown)]

    def _parsed(self) -> list[Piece]:
        parser = self._markup.parser
        if parser is None or not self._call.strip():
            return self._as_content()
        try:
            calls = parse_calls(self._call, parser, self._tools)
        except NoCall:
            return self._as_content()
        self._call = self._breaks = ""
        return list(calls)

    def _as_content(self) -> list[Piece]:
        text = self._breaks + self._call
        self._call = self._breaks = ""
        return [Delta(text)] if text.strip() else []
