"""One request's text: generated tokens in, what the client may see out.

Pure and synchronous. Where the detokenizer says `in_worker`, the stream is made
and used in its tokenizer's worker; else on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlxd.text.detokenize import Detokenizer
from mlxd.text.pieces import Delta, TokenText
from mlxd.text.stops import StopScanner
from mlxd.wire import Token


@dataclass(frozen=True, slots=True)
class _Given:
    """A token whose text is not wholly out yet, and where that text lies."""

    count: int  # of tokens up to and with this one
    start: int
    end: int
    shown: TokenText | None


class TextStream:
    """Detokenizes, finds stop strings, and holds back what must not be seen yet.

    Joined, all deltas are the non-streamed text: the same machine makes both.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        last_prompt_token: int,
        stops: Sequence[str] = (),
        drop_leading_space: bool = False,
    ) -> None:
        """
        Args:
            last_prompt_token: put before the text, so that it joins on as it would
                in one decoding of prompt and answer.
            drop_leading_space: as chat does; completions keep theirs.
        """
        self._detokenizer = detokenizer
        self._detokenizer.prime(last_prompt_token)
        self._stops = StopScanner(stops)
        self._at_start = drop_leading_space
        self._length = 0  # characters given to the scanner
        self._count = 0  # tokens taken
        self._pending: deque[_Given] = deque()
        self._stopped_at: int | None = None

    @property
    def stopped_at(self) -> int | None:
        """Count of tokens with the one that completed a stop string; None = no stop."""
        return self._stopped_at

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return None if self._stops.match is None else self._stops.match.stop

    def feed(self, tokens: Sequence[Token]) -> Delta:
        """Take tokens in order. After a stop string was found there is nothing more."""
        return Delta.joined([self._feed(token) for token in tokens if self._stopped_at is None])

    def finish(self) -> Delta:
        """The row has ended: flush, once, what was held for a reason now gone."""
        if self._stopped_at is not None:
            return Delta("")
        tail = self._trimmed(self._detokenizer.flush())
        text = self._stops.finish()
        if self._stops.match is None:
            # An incomplete character is part of no stop.
            text += tail
        return Delta(text, self._visible(last=True))

    def _feed(self, token: Token) -> Delta:
        self._count += 1
        start = self._length
        new = self._trimmed(self._detokenizer.feed(token.token))
        self._length += len(new)
        self._pending.append(
            _Given(self._count, start, self._length, self._shown(token, offset=start))
        )
        text = self._stops.push(new)
        return Delta(text, self._visible(last=False))

    def _trimmed(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def _visible(self, *, last: bool) -> tuple[TokenText, ...]:
        """Tokens that may be shown now; settles `stopped_at` once a stop is certain."""
        shown: list[TokenText] = []
        match = self._stops.match
        if match is not None:
            self._stopped_at = next(each.count for each in self._pending if each.end >= match.end)
        while self._pending and (last or match or self._is_out(self._pending[0])):
            given = self._pending.popleft()
            if given.shown is not None and (match is None or given.start < match.start):
                shown.append(given.shown)
        return tuple(shown)

    def _is_out(self, given: _Given) -> bool:
        """Whether its text was let through; of a token without text, what follows it."""
        return given.start < self._stops.released and given.end <= self._stops.released

    def _shown(self, token: Token, *, offset: int) -> TokenText | None:
        if token.logprobs is None:
            return None
        piece = self._detokenizer.piece
        return TokenText(
            piece=piece(token.token),
            logprob=token.logprobs.chosen,
            top=tuple((piece(other), logprob) for other, logprob in token.logprobs.top),
            offset=offset,
        )
