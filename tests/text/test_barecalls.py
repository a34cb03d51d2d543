"""Calls written as bare JSON: what is one, what is text, what is held."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.text.answer import joined
from mlxd.text.barecalls import BareCalls
from mlxd.text.pieces import Delta, Piece, ToolCall
from tests.text.marked import tool

TOOLS = [tool("get_weather", city="string"), tool("add", a="integer")]
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
WEATHER = ToolCall("", "get_weather", '{"city": "Paris"}')


def taken_apart(*texts: str, cut: bool = False) -> list[Piece]:
    """The pieces of a whole answer that came in these parts; ids left out."""
    answer = BareCalls(None, TOOLS)
    pieces = [piece for text in texts for piece in answer.push(text)]
    pieces += answer.finish(cut=cut)
    return [
        ToolCall("", piece.name, piece.arguments) if isinstance(piece, ToolCall) else piece
        for piece in joined(pieces)
    ]


@pytest.mark.parametrize(
    "text",
    [
        LLAMA,
        f"\n {LLAMA} \n",
        f"<|python_tag|>{LLAMA}",
        f"[{LLAMA}]",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    ],
)
def test_an_answer_that_is_a_call_is_a_call(text: str) -> None:
    """Under either name of the arguments, in a list, after the token that some put before it."""
    assert taken_apart(text) == [WEATHER]


@pytest.mark.parametrize("between", ["; ", "\n", "", ", "])
def test_several_calls_in_a_row_are_several(between: str) -> None:
    """Whatever stands between them."""
    assert taken_apart(f"{LLAMA}{between}{LLAMA}") == [WEATHER, WEATHER]
    assert taken_apart(f"[{LLAMA}, {LLAMA}]") == [WEATHER, WEATHER]


@pytest.mark.parametrize(
    "text",
    [
        "The weather is fine.",
        '{"city": "Paris"}',
        '{"name": "launch", "parameters": {}}',
        f"{LLAMA} is what I would call.",
        "[1, 2]",
        "[]",
        "{oops",
        "   ",
        "<|python",
    ],
)
def test_what_is_no_call_is_content_as_it_stands(text: str) -> None:
    """JSON that somebody asked for included."""
    assert taken_apart(text) == [Delta(text)]


def test_text_is_not_held() -> None:
    """Its first character shows what it is."""
    answer = BareCalls(None, TOOLS)
    assert answer.push("The ") == [Delta("The ")]
    assert answer.push('{"name": ') == [Delta('{"name": ')]


def test_a_call_that_was_cut_is_content() -> None:
    """Even if it would parse: more could have come."""
    assert taken_apart(LLAMA, cut=True) == [Delta(LLAMA)]


@given(
    text=st.lists(st.sampled_from([LLAMA, ";", " ", "[", "]", "a", "<|python_tag|>"])).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_the_pieces_do_not_depend_on_how_the_text_came(text: str, cuts: list[int]) -> None:
    """Joined, they are those of the whole text at once."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert taken_apart(*(text[a:b] for a, b in itertools.pairwise(bounds))) == taken_apart(text)
