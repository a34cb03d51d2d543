"""Calls that are written as bare JSON, without markers: some models' form, and the enforced one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxd.text.calls import NoCall, parse_calls
from mlxd.text.markup import Parts
from mlxd.text.pieces import Delta, Piece

# Llama writes several with a semicolon between, and this token before some.
_BETWEEN = re.compile(r"[\s;,]*")
_TAG = "<|python_tag|>"


def parse_bare(text: str, _tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a text that is nothing but calls.

    Raises:
        ValueError: it is something else.
    """
    decoder = json.JSONDecoder()
    calls: list[dict[str, Any]] = []
    text = text.strip().removeprefix(_TAG)
    position = _next(text, 0)
    while position < len(text):
        found, position = decoder.raw_decode(text, position)
        calls += [_call(each) for each in (found if isinstance(found, list) else [found])]
        position = _next(text, position)
    return calls


def _next(text: str, position: int) -> int:
    between = _BETWEEN.match(text, position)
    return position if between is None else between.end()


def _call(found: object) -> dict[str, Any]:
    match found:
        case {"name": name, "arguments": arguments} | {"name": name, "parameters": arguments}:
            return {"name": name, "arguments": arguments}
    raise ValueError("a call has a name and arguments")


class BareCalls:
    """An answer whose content is calls or text, as its beginning shows.

    Content that begins like JSON is held until it ends; if it is no call, it is content.
    """

    def __init__(self, parts: Parts | None, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            parts: what tells reasoning from content; None = there is content alone.
        """
        self._parts = parts
        self._tools = tools
        self._held = ""
        self._is_text = False

    @property
    def reasons(self) -> bool:
        """Whether the text is in its reasoning now."""
        return self._parts is not None and self._parts.reasons

    def push(self, text: str) -> list[Piece]:
        """Add text; the pieces that it completes."""
        if self._parts is None:
            return self._taken(Delta(text))
        return [out for piece in self._parts.push(text) for out in self._taken(piece)]

    def finish(self, *, cut: bool) -> list[Piece]:
        """The text is over; see `Parts.finish`."""
        last = [] if self._parts is None else self._parts.finish(cut=cut)
        pieces = [out for piece in last for out in self._taken(piece)]
        held, self._held = self._held, ""
        if not held:
            return pieces
        return pieces + ([Delta(held)] if cut else self._parsed(held))

    def _parsed(self, text: str) -> list[Piece]:
        try:
            return list(parse_calls(text, parse_bare, self._tools))
        except NoCall:
            return [Delta(text)]

    def _taken(self, piece: Piece) -> list[Piece]:
        if not isinstance(piece, Delta) or self._is_text:
            return [piece] if not isinstance(piece, Delta) or piece else []
        self._held += piece.text
        if _may_be_calls(self._held.lstrip()):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [Delta(held)]


def _may_be_calls(text: str) -> bool:
    return not text or text[0] in "{[" or text.startswith(_TAG) or _TAG.startswith(text)
