"""One request's text: tokens in, deltas out, and where it stopped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.text.detokenize import ByteDetokenizer, BytePieces, byte_level_piece
from mlxd.text.pieces import Delta
from mlxd.text.stream import TextStream
from mlxd.wire import Token, TokenLogprobs

#: Every byte is a token, and so are some words; the prompt ends with token 0.
WORDS = ["", "Ġthe", "DEF", "abDEFx", "Ġ", "Ċ"]
ALPHABET = [chr(byte) for byte in range(0x21, 0x7F)]
EMOJI = ["ð", "Ł", "ĺ", "Ģ"]  # the four bytes of 😀 as GPT-2 writes them
VOCAB = [*WORDS, *ALPHABET, *EMOJI]
PIECES = BytePieces(VOCAB, byte_level_piece)


def ids(*words: str) -> list[int]:
    """Token ids of these entries of the vocabulary."""
    return [VOCAB.index(word) for word in words]


def stream(stops: Sequence[str] = (), *, chat: bool = False) -> TextStream:
    """A fresh stream."""
    return TextStream(
        ByteDetokenizer(PIECES), last_prompt_token=0, stops=stops, drop_leading_space=chat
    )


def tokens(words: Sequence[int], *, logprobs: bool = False) -> list[Token]:
    """Tokens of one request."""
    logprob = TokenLogprobs(-1.0, [(7, -1.0)]) if logprobs else None
    return [Token(1, word, logprob) for word in words]


def run(text: TextStream, words: Sequence[int]) -> list[str]:
    """The text of each delta, one token at a time, the end last."""
    deltas = [text.feed([token]) for token in tokens(words)]
    return [delta.text for delta in [*deltas, text.finish()]]


def test_a_stop_string_counts_tokens_up_to_the_one_that_completed_it() -> None:
    """Tokens after it, even of the same batch, do not count."""
    text = stream(["DEF"])
    delta = text.feed(tokens(ids("A", "B", "D", "E", "F", "G", "H")))
    assert (delta.text, text.stopped_at) == ("AB", 5)
    assert text.feed(tokens(ids("I"))) == Delta("")
    assert text.finish() == Delta("")


def test_a_stop_inside_one_token_cuts_that_token() -> None:
    """What stands before the stop in its token is text."""
    text = stream(["DEF"])
    assert text.feed(tokens(ids("A", "abDEFx"))).text == "Aab"
    assert text.stopped_at == 2


def test_a_stop_that_waited_for_a_longer_one_counts_where_it_completed() -> None:
    """The tokens that showed that the longer one does not come are not counted."""
    text = stream(["EF", "DEFGHIJ"])
    assert "".join(run(text, ids("C", "D", "E", "F", "G", "X"))) == "CD"
    assert text.stopped_at == 4


def test_a_stop_still_waiting_at_the_end_counts() -> None:
    """The end settles it: the text ends before the stop that is complete."""
    text = stream(["EF", "DEFGHIJ"])
    assert "".join(run(text, ids("C", "D", "E", "F"))) == "CD"
    assert text.stopped_at == 4


def test_a_limit_inside_an_emoji_flushes_once_after_what_was_held() -> None:
    """The half of a stop string and the half of a character both go out, in order."""
    assert run(stream(["yz"]), ids("x", "y", *EMOJI[:3])) == ["x", "", "", "", "", "y\ufffd"]


def test_an_emoji_is_never_sent_in_halves() -> None:
    """Its text comes with its last byte."""
    assert run(stream(), ids("x", *EMOJI, "Ġthe")) == ["x", "", "", "", "😀", " the", ""]


def test_chat_drops_one_leading_space_and_completions_keep_it() -> None:
    """Only one, only at the very start."""
    words = ids("Ġ", "Ġthe", "Ġthe")
    assert "".join(run(stream(chat=True), words)) == " the the"
    assert "".join(run(stream(), words)) == "  the the"


def test_white_space_only_deltas_keep_their_bytes() -> None:
    """Line breaks and spaces are text like other text."""
    assert run(stream(), ids("Ċ", "Ġ", "Ċ")) == ["\n", " ", "\n", ""]


def test_every_token_is_shown_once_with_its_place_in_the_text() -> None:
    """As many entries as tokens, those inside a character included."""
    text = stream()
    words = ids("x", *EMOJI, "Ġthe")
    deltas = [text.feed([token]) for token in tokens(words, logprobs=True)]
    shown = Delta.joined([*deltas, text.finish()]).tokens
    assert [token.piece for token in shown] == [PIECES[word] for word in words]
    assert [token.offset for token in shown] == [0, 1, 1, 1, 1, 2]
    assert shown[0].top == ((PIECES[7], -1.0),)


def test_tokens_of_a_stop_string_are_not_shown() -> None:
    """Nothing of a stop is sent, in log-probabilities neither."""
    text = stream(["DEF"])
    deltas = [text.feed([each]) for each in tokens(ids("A", "D", "E", "F"), logprobs=True)]
    assert [token.piece for token in Delta.joined(deltas).tokens] == [b"A"]


@given(
    words=st.lists(st.integers(0, len(VOCAB) - 1), max_size=20),
    stops=st.lists(st.text("DEFabx", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    chat=st.booleans(),
)
def test_the_joined_deltas_do_not_depend_on_the_chunks(
    words: list[int], stops: list[str], cuts: list[int], chat: bool
) -> None:
    """Text, shown tokens and the count at the stop are those of one token at a time."""
    single = stream(stops, chat=chat)
    each = [single.feed([token]) for token in tokens(words, logprobs=True)]
    want = Delta.joined([*each, single.finish()])
    bounds = [0, *sorted(min(cut, len(words)) for cut in cuts), len(words)]
    text = stream(stops, chat=chat)
    batches = [words[a:b] for a, b in itertools.pairwise(bounds)]
    deltas = [text.feed(tokens(batch, logprobs=True)) for batch in batches]
    assert Delta.joined([*deltas, text.finish()]) == want
    assert text.stopped_at == single.stopped_at
    assert not any(stop in want.text for stop in stops)


@pytest.mark.parametrize("chat", [True, False])
def test_nothing_generated_is_no_text(chat: bool) -> None:
    """An end of sequence as the first token gives an empty answer."""
    assert run(stream(chat=chat), []) == [""]
