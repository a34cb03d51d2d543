"""A request from its submission to its end, and its account."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxd.wire import Finished, FinishReason, Submit


@dataclass(slots=True, eq=False)
class Row:
    """One request in the engine. The scheduler is its only writer."""

    request: Submit
    turn: int | None = None  # its place in the order of admission; None before
    began: float = 0.0
    cached: int = 0  # prompt tokens that came from the prefix cache, at the first start
    prefilled: int = 0  # leading tokens whose state exists or is on its way
    computed: int = 0  # tokens that were computed in prefill, in all its starts
    enqueued: int = 0  # tokens whose computation was enqueued
    given: list[int] = field(default_factory=list)  # tokens read
    lost: int = 0  # tokens whose computation a preemption left unread
    prefix: int = 0  # of these, the ones that were given before its last start
    decoding_since: float | None = None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def generated(self) -> int:
        """Tokens read."""
        return len(self.given)

    @property
    def context(self) -> list[int]:
        """What has to be prefilled: the prompt, and what was given before a preemption."""
        return (
            [*self.request.prompt, *self.given[: self.prefix]]
            if self.prefix
            else self.request.prompt
        )

    @property
    def length(self) -> int:
        """Tokens of its context."""
        return len(self.request.prompt) + self.prefix

    @property
    def to_prefill(self) -> int:
        """Tokens left; the last one is fed to the first decode step."""
        return self.length - 1 - self.prefilled

    @property
    def remaining(self) -> int:
        """Tokens that it may still be given."""
        return self.request.max_tokens - self.generated

    @property
    def wants_step(self) -> bool:
        """Whether one more token may be computed for it."""
        return self.enqueued < self.request.max_tokens

    def take(self, token: int) -> FinishReason | None:
        """Count one token and say whether it ends the row: end of sequence first, then length."""
        self.given.append(token)
        if token in self.request.eos:
            return FinishReason.STOP
        if self.generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def preempt(self) -> None:
        """Its state is gone; all that it was given stays, and is computed again."""
        self.lost += self.enqueued - self.generated
        self.prefix = self.enqueued = self.generated
        self.prefilled = 0

    def finished(self, reason: FinishReason, error: str | None, now: float) -> Finished:
        """The account, as of now."""
        decoding_since = now if self.decoding_since is None else self.decoding_since
        return Finished(
            id=self.id,
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            generated_tokens=self.generated,
            discarded_tokens=self.lost + self.enqueued - self.generated,
            prefill_seconds=decoding_since - self.began,
            decode_seconds=now - decoding_since,
            error=error,
            # The last prompt token is computed with the first generated one.
            prefilled_tokens=self.computed + (self.enqueued > 0),
        )
