"""Detokenizers against the tokenizer's own decoding, which is the oracle of all text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models

from mlxd.text.detokenize import (
    REPLACEMENT,
    ByteDetokenizer,
    BytePieces,
    Detokenizer,
    WindowDetokenizer,
    byte_level_piece,
    spm_piece,
)
from mlxd.text.loading import byte_pieces, load_wrapper

VOCAB = 49152
EMOJI = "repeat: 😀 ďábelské 日本語"


@pytest.fixture(scope="module")
def wrapper(starter_path: Path) -> TokenizerWrapper:
    """The starter's tokenizer, which is byte-level BPE."""
    return load_wrapper(starter_path, trust_remote_code=False)


def bytes_of(wrapper: TokenizerWrapper) -> BytePieces:
    """The byte table of a tokenizer that has one."""
    pieces = byte_pieces(wrapper)
    assert pieces is not None
    return pieces


def text_of(detokenizer: Detokenizer, prompt: int, tokens: Sequence[int]) -> str:
    """All text of these tokens after this one of the prompt."""
    detokenizer.prime(prompt)
    return "".join([*(detokenizer.feed(token) for token in tokens), detokenizer.flush()])


Decode = Callable[[Sequence[int]], str]


def oracle(decode: Decode, prompt: int, tokens: Sequence[int]) -> str:
    """The decoding of prompt and answer, less that of the prompt."""
    return decode([prompt, *tokens])[len(decode([prompt])) :]


whole_prompts = st.integers(0, VOCAB - 1)
answers = st.lists(st.integers(0, VOCAB + 50), max_size=24)


@settings(deadline=None, max_examples=300)
@given(prompt=whole_prompts, tokens=answers)
def test_any_tokens_give_the_oracles_text(
    wrapper: TokenizerWrapper, prompt: int, tokens: list[int]
) -> None:
    """Special tokens, broken characters and ids beyond the vocabulary included."""
    if wrapper.decode([prompt]).endswith(REPLACEMENT):
        prompt = 2  # a prompt that ends inside a character has a test of its own
    assert text_of(ByteDetokenizer(bytes_of(wrapper)), prompt, tokens) == oracle(
        wrapper.decode, prompt, tokens
    )


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_without_replacements(wrapper: TokenizerWrapper, text: str) -> None:
    """Whole characters are never given in halves, by either kind of detokenizer."""
    tokens = wrapper.encode(text, add_special_tokens=False)
    want = wrapper.decode(tokens)  # a few bytes are not in this vocabulary
    for detokenizer in (ByteDetokenizer(bytes_of(wrapper)), WindowDetokenizer(wrapper.decode)):
        detokenizer.prime(2)
        parts = [detokenizer.feed(token) for token in tokens]
        assert "".join([*parts, detokenizer.flush()]) == want
        assert REPLACEMENT in want or not any(REPLACEMENT in part for part in parts)


def test_an_incomplete_character_is_held_and_flushed_once(wrapper: TokenizerWrapper) -> None:
    """A limit inside an emoji leaves one replacement, at the very end."""
    tokens = wrapper.encode("a😀", add_special_tokens=False)[:-1]
    for detokenizer in (ByteDetokenizer(bytes_of(wrapper)), WindowDetokenizer(wrapper.decode)):
        detokenizer.prime(2)
        assert "".join(detokenizer.feed(token) for token in tokens) == "a"
        assert detokenizer.flush() == REPLACEMENT
        assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_is_finished(wrapper: TokenizerWrapper) -> None:
    """The tokens that complete it give the character, not a replacement."""
    first, *rest = wrapper.encode("😀", add_special_tokens=False)
    assert text_of(ByteDetokenizer(bytes_of(wrapper)), first, rest) == "😀"


def test_a_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    """Added tokens may hold any character; NUL is a byte like others."""
    assert byte_level_piece("<｜end▁of▁text｜>") == "<｜end▁of▁text｜>".encode()
    assert byte_level_piece("ĠhiĀ") == b" hi\x00"
    assert BytePieces(["a", None], byte_level_piece)[1] == b""


#: A small vocabulary with SentencePiece's byte fallback; `<s>` ends the prompt.
WORDS = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁", "é"]
START = 1


def sentencepiece() -> Decode:
    """The decoding of that vocabulary, with the decoder that strips the first space."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def sentencepiece_pieces() -> BytePieces:
    """The bytes of that vocabulary, from the map that mlx-lm makes of one."""
    table = [
        bytes([int(word[3:5], 16)]) if word.startswith("<0x") else word.encode() for word in WORDS
    ]
    return BytePieces(table, spm_piece)


whole_words = st.sampled_from(["▁", "▁a", "b", "▁▁", "é", "<s>"]).map(lambda word: [word])
byte_words = st.characters(min_codepoint=0x80, exclude_categories=["Cs"]).map(
    lambda char: [f"<0x{byte:02X}>" for byte in char.encode()]
)


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(whole_words | byte_words, max_size=12))
def test_sentencepiece_tokens_give_the_oracles_text(pieces: list[list[str]]) -> None:
    """Spaces, byte fallback and the stripped first space come out as in one decoding."""
    decode = sentencepiece()
    tokens = [WORDS.index(word) for piece in pieces for word in piece]
    want = oracle(decode, START, tokens)
    assert text_of(ByteDetokenizer(sentencepiece_pieces()), START, tokens) == want
    assert text_of(WindowDetokenizer(decode), START, tokens) == want


def test_broken_sentencepiece_bytes_do_not_take_whole_characters_with_them() -> None:
    """The one known difference: the oracle replaces every byte of a run that breaks at its end."""
    tokens = [WORDS.index(f"<0x{byte:02X}>") for byte in "日".encode() + b"\xf0"]
    assert oracle(sentencepiece(), START, tokens) == REPLACEMENT * 4
    assert text_of(ByteDetokenizer(sentencepiece_pieces()), START, tokens) == "日" + REPLACEMENT


def test_a_window_does_not_grow_with_what_never_becomes_text(wrapper: TokenizerWrapper) -> None:
    """A run of broken bytes is given out, not decoded again and again at growing length."""
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return str(wrapper.decode(tokens))

    detokenizer = WindowDetokenizer(decode)
    detokenizer.prime(2)
    broken = wrapper.encode("😀", add_special_tokens=False)[0]
    for _ in range(200):
        detokenizer.feed(broken)
    assert max(lengths) < 25
