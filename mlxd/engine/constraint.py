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

    def of(self, text: str, eos: Iterable[int], *, after: Sequence[int] = ()) -> Constraint:
        """A row's constraint, at its answer's start.

        Args:
            text: a grammar of `mlxd.grammar`.
            eos: the tokens that end the answer where the grammar lets it end.
            after: tokens behind which the grammar begins; none = at once.
        """
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=grammar.limits())
        return Constraint(matcher, eos, self._tokenizer, after)


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

    def __init__(
        self,
        matcher: LLMatcher,
        eos: Iterable[int],
        tokenizer: LLTokenizer,
        after: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._its_eos = list(tokenizer.eos_tokens)
        self._words = -(-tokenizer.vocab_size // 32)
        self._after = list(after)
        self._given: list[int] = []
        # Where in these the grammar begins; None = what it begins behind has not come yet.
        self._start = None if self._after else 0

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        if not self._matcher.is_error():
            return None
        return f"the response format cannot be followed: {self._matcher.get_error()}"

    def advance(self, token: int) -> None:
        """Take the row's next token."""
        if token in self._eos:
            return
        self._given.append(token)
        if self._start is not None:
            self._matcher.consume_token(token)
        elif self._given[-len(self._after) :] == self._after:
            self._start = len(self._given)

    def follow(self, tokens: Sequence[int]) -> None:
        """Stand behind exactly these tokens of the answer, whatever was taken before."""
        wanted = [token for token in tokens if token not in self._eos]
        same = 0
        while same < min(len(wanted), len(self._given)) and wanted[same] == self._given[same]:
            same += 1
        if same < len(self._given):
            self._go_back(same)
        for token in wanted[same:]:
            self.advance(token)

    def _go_back(self, count: int) -> None:
        """Stand behind the first so many of the tokens taken."""
        if self._start is not None:
            self._matcher.rollback(len(self._given) - max(count, self._start))
            if count < self._start:
                self._start = None
        del self._given[count:]

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, int32 [vocabulary / 32], lowest bit first.

        Takes some 10 microseconds, rarely a few milliseconds.
        """
        words = np.full(self._words, _ALL)
        if self._matcher.is_error():
            return words  # the row ends with the error; any token will do
        bits = words.view(np.uint32)
        if self._start is None:
            self._forbid(bits, self._eos)
            return words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._forbid(bits, self._its_eos)
        if self._matcher.is_accepting():
            for token in self._eos:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return words

    @staticmethod
    def _forbid(bits: np.ndarray, tokens: Iterable[int]) -> None:
        for token in tokens:
            bits[token // 32] &= ~np.uint32(1 << token % 32)


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
