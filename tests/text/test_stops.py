"""Stop strings: what is let through, what is held, where the text ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxd.text.stops import Match, StopScanner


def scan(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], Match | None]:
    """What the scanner lets through piece by piece, the end last, and the match."""
    scanner = StopScanner(stops)
    out = [scanner.push(piece) for piece in pieces]
    return [*out, scanner.finish()], scanner.match


def test_nothing_of_a_stop_string_is_let_through() -> None:
    """The text ends before the stop, however many pieces it came in."""
    out, match = scan(["DEFGHIJ"], list("ABCDEFGHIJKL"))
    assert "".join(out) == "ABC"
    assert match == Match(3, 10, "DEFGHIJ")


def test_held_text_is_released_when_the_stop_does_not_come() -> None:
    """What began like a stop goes out with the piece that shows that it is none."""
    out, match = scan(["DEFGHIJ"], ["ABC", "DEF", "GX", "Y"])
    assert out == ["ABC", "", "DEFGX", "Y", ""]
    assert match is None


def test_held_text_is_released_at_the_end() -> None:
    """A stop that is only half there at the end is text."""
    out, match = scan(["DEFGHIJ"], ["ABCDEF"])
    assert out == ["ABC", "DEF"]
    assert match is None


def test_the_earliest_of_several_stops_wins_not_the_first_listed() -> None:
    """The order in the request does not matter."""
    assert scan(["GH", "CD"], ["ABCDEFGH"])[1] == Match(2, 4, "CD")
    assert scan(["CD", "GH"], ["ABCDEFGH"])[1] == Match(2, 4, "CD")


def test_a_longer_stop_that_began_earlier_wins_over_one_inside_it() -> None:
    """A complete match waits while an earlier one may still complete."""
    out, match = scan(["EF", "DEFGHIJ"], list("ABCDEFGHIJ"))
    assert "".join(out) == "ABC"
    assert match == Match(3, 10, "DEFGHIJ")


def test_a_stop_inside_a_longer_one_that_does_not_come_still_counts() -> None:
    """The waiting match is settled when the longer stop fails, or at the end."""
    out, match = scan(["EF", "DEFGHIJ"], list("ABCDEFX"))
    assert ("".join(out), match) == ("ABCD", Match(4, 6, "EF"))
    out, match = scan(["EF", "DEFGHIJ"], list("ABCDEF"))
    assert ("".join(out), match) == ("ABCD", Match(4, 6, "EF"))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_result_depends_on_the_text_alone(stops: list[str], text: str, cuts: list[int]) -> None:
    """However the text is cut, it ends before the leftmost occurrence of any stop."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    places = [text.find(stop) for stop in stops if stop in text]
    out, match = scan(stops, pieces)
    assert "".join(out) == (text[: min(places)] if places else text)
    assert (match is not None) == bool(places)
