"""Tokens to text, one at a time.

mlx-lm's streaming detokenizers drop a leading space, raise on some characters
at the end and lose NUL; these do not. Tokens of the two byte-based families
are joined as bytes in pure Python (under a microsecond a token); any other
tokenizer decodes a sliding window of tokens, in its worker.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

REPLACEMENT = "\ufffd"

# A character is at most four tokens; a longer run of replacements is no character
# still to come, and holding it would decode an ever longer window.
MAX_HELD_TOKENS = 8

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Streaming state of one request.

    Joined, `prime(last prompt token)` and then all of `feed` and `flush` is the
    text that those tokens add to the prompt's.
    """

    #: Whether it may only be used in its tokenizer's worker.
    in_worker: bool

    def prime(self, token: int) -> None:
        """Put a token of the prompt before the text; call it at most once, first."""

    def feed(self, token: int) -> str:
        """Text that this token completes; characters still incomplete are held."""

    def flush(self) -> str:
        """What was held, at the end; incomplete characters become U+FFFD."""

    def piece(self, token: int) -> bytes:
        """The bytes of one token by itself; changes nothing."""


S = TypeVar("S", str, bytes)


def _gpt2_bytes() -> dict[str, int]:
    """Byte of each character of GPT-2's printable alphabet for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _gpt2_bytes()


def byte_level_piece(token: str) -> bytes:
    """Bytes of a byte-level BPE token; an added token outside the alphabet is text."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def spm_piece(token: bytes) -> bytes:
    """Bytes of a SentencePiece token, whose spaces are written as U+2581."""
    return token.replace("\u2581".encode(), b" ")


class BytePieces:
    """Bytes of each token of a vocabulary, computed when first seen.

    Ids past the vocabulary (models pad theirs) have none, as in the tokenizer's
    own `decode`.
    """

    def __init__(self, tokens: Sequence[S | None], piece: Callable[[S], bytes]) -> None:
        self._lookup = partial(_piece_at, tokens, piece)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._lookup(token)
        return known


def _piece_at(tokens: Sequence[S | None], piece: Callable[[S], bytes], token: int) -> bytes:
    written = tokens[token] if 0 <= token < len(tokens) else None
    return b"" if written is None else piece(written)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: an incremental UTF-8 decoder."""

    in_worker = False

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder = _utf8(errors="replace")

    def prime(self, token: int) -> None:
        """Put a token of the prompt before the text."""
        self._decoder.decode(self._pieces[token])

    def feed(self, token: int) -> str:
        """Text that this token completes."""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """What was held, at the end."""
        return self._decoder.decode(b"", final=True)

    def piece(self, token: int) -> bytes:
        """The bytes of one token by itself."""
        return self._pieces[token]


class WindowDetokenizer:
    """For any tokenizer: decode the last few tokens with and without the new ones.

    The window starts where text was last complete, so that the spaces a decoder
    puts between words, or strips at the start, come out as in the whole text.
    """

    in_worker = True

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._done = 0  # tokens at the window's start whose text was given
        self._given = ""  # their text

    def prime(self, token: int) -> None:
        """Put a token of the prompt before the text."""
        self._window = [token]
        self._done = 1
        self._given = self._decode(self._window)

    def feed(self, token: int) -> str:
        """Text that this token completes."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._done
        if text.endswith(REPLACEMENT) and held <= MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What was held, at the end."""
        return self._advance(self._decode(self._window)) if self._window else ""

    def piece(self, token: int) -> bytes:
        """The bytes of one token by itself."""
        return self._decode([token]).encode()

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            self._window = self._window[self._done :]
            self._done = len(self._window)
            self._given = self._decode(self._window)
        return new
