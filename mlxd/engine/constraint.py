"""Grammars that rows must follow: which tokens may come next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mlxd import grammar

_ALL = np.int32(-1)  # every bit set


class Constraints:
    """Makes the constraints of one model's rows, from its tokenizer."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        """
        Args:
            vocab_size: ids that the model knows; the tokenizer may know more.
        """
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    @classmethod
    def of_folder(cls, folder: Path, vocab_size: int) -> Constraints | None:
        """From a model folder's tokenizer.json; None where there is none that can be used.

        Standard error says why.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            print("no tokenizer.json: no structured output", file=sys.stderr)  # noqa: T201
            return None
        try:
            return cls(_tokenizer(path.read_text(), vocab_size), vocab_size)
        except (ValueError, UnicodeDecodeError) as error:
            print(f"no structured output: {error}", file=sys.stderr)  # noqa: T201
            return None

    def of(self, text: str, eos: Iterable[int]) -> Constraint:
        """A row's constraint, at its answer's start.

        Args:
            text: a grammar of `mlxd.grammar`.
            eos: the tokens that end the answer where the grammar lets it end.
        """
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=grammar.limits())
        return Constraint(matcher, eos, self._tokenizer)


def _tokenizer(text: str, vocab_size: int) -> LLTokenizer:
    tokenizer = LLTokenizer(text)
    if tokenizer.vocab_size < vocab_size:  # the model's embedding is padded
        tokenizer = LLTokenizer(text, n_vocab=vocab_size)
    return tokenizer


class Constraint:
    """Where one row stands in its grammar.

    The end of the answer is decided here, not by llguidance: which tokens end a
    row is the request's to say.
    """

    def __init__(self, matcher: LLMatcher, eos: Iterable[int], tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._its_eos = list(tokenizer.eos_tokens)
        self._words = -(-tokenizer.vocab_size // 32)
        self._given: list[int] = []

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        if not self._matcher.is_error():
            return None
        return f"the response format cannot be followed: {self._matcher.get_error()}"

    def advance(self, token: int) -> None:
        """Take the row's next token."""
        if token not in self._eos:
            self._matcher.consume_token(token)
            self._given.append(token)

    def follow(self, tokens: Sequence[int]) -> None:
        """Stand behind exactly these tokens of the answer, whatever was taken before."""
        wanted = [token for token in tokens if token not in self._eos]
        same = 0
        while same < min(len(wanted), len(self._given)) and wanted[same] == self._given[same]:
            same += 1
        if same < len(self._given):
            self._matcher.rollback(len(self._given) - same)
            del self._given[same:]
        for token in wanted[same:]:
            self.advance(token)

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [vocabulary / 32], lowest bit first.

        Takes some 10 microseconds, rarely a few milliseconds.
        """
        words = np.full(self._words, _ALL)
        if self._matcher.is_error():
            return words  # the row ends with the error; any token will do
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = words.view(np.uint32)
        for token in self._its_eos:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        if self._matcher.is_accepting():
            for token in self._eos:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return words


def constrain(logits: mx.array, constraints: Mapping[int, Constraint]) -> mx.array:
    """Make impossible what a row's grammar does not allow next.

    Args:
        logits: [rows, vocabulary].
        constraints: of the rows that have one, by number.
    """
    masks = {row: constraint.allowed() for row, constraint in constraints.items()}
    words = np.full((logits.shape[0], max(len(mask) for mask in masks.values())), _ALL)
    for row, mask in masks.items():
        words[row] = mask
    return _masked(logits, mx.array(words.view(np.uint32)))


@mx.compile
def _masked(logits: mx.array, words: mx.array) -> mx.array:
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]]
    # A head wider than the embedding has logits that stand for no token.
    allowed = mx.pad(allowed, [(0, 0), (0, logits.shape[1] - allowed.shape[1])])
    return mx.where(allowed != 0, logits, -mx.inf)
