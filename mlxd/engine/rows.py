"""A request from its admission to its end, and its account."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd.wire import Finished, FinishReason, Submit


@dataclass(slots=True, eq=False)
class Row:
    """One admitted request. The scheduler is its only writer."""

    request: Submit
    began: float
    cached: int = 0  # prompt tokens that came from the prefix cache
    prefilled: int = 0  # prompt tokens whose state exists or is on its way, cached ones included
    enqueued: int = 0  # tokens whose computation was enqueued
    generated: int = 0  # tokens read
    decoding_since: float | None = None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def to_prefill(self) -> int:
        """Prompt tokens left; the last one is fed to the first decode step."""
        return len(self.request.prompt) - 1 - self.prefilled

    @property
    def wants_step(self) -> bool:
        """Whether one more token may be computed for it."""
        return self.enqueued < self.request.max_tokens

    def take(self, token: int) -> FinishReason | None:
        """Count one token and say whether it ends the row: end of sequence first, then length."""
        self.generated += 1
        if token in self.request.eos:
            return FinishReason.STOP
        if self.generated >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def finished(self, reason: FinishReason, error: str | None, now: float) -> Finished:
        """The account, as of now."""
        decoding_since = now if self.decoding_since is None else self.decoding_since
        return Finished(
            id=self.id,
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            generated_tokens=self.generated,
            discarded_tokens=self.enqueued - self.generated,
            prefill_seconds=decoding_since - self.began,
            decode_seconds=now - decoding_since,
            error=error,
            # The last prompt token is computed with the first generated one.
            prefilled_tokens=self.prefilled - self.cached + (self.enqueued > 0),
        )


def ended_waiting(request: Submit) -> Finished:
    """The account of a request that was cancelled before anything was computed for it."""
    return Row(request, 0.0, decoding_since=0.0).finished(FinishReason.CANCELLED, None, 0.0)
