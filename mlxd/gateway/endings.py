"""How a request can end, apart from a stop string that the text layer finds."""

from __future__ import annotations

from dataclasses import dataclass

from mlxd.errors import BadRequest, Draining, EngineFailed, MlxdError, TimedOut, Withdrawn
from mlxd.wire import Finished, FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    """The parts of a request's outcome that are not known from its start."""

    outcome: str  # see `serving.Outcome.name`
    finish_reason: str
    completion_tokens: int
    error: MlxdError | None = None


def of_row(frame: Finished) -> Ending:
    """The engine ended the row by itself."""
    match frame.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return Ending(frame.reason, frame.reason, frame.generated_tokens)
        case FinishReason.CANCELLED:
            message = "the engine gave the request up"
        case FinishReason.FORMAT:
            error = BadRequest(frame.error or "", param="response_format", code="format_failed")
            return Ending("error", "length", frame.generated_tokens, error)
        case FinishReason.ERROR:
            message = frame.error or "the step failed"
    return failed(message, frame.generated_tokens)


def failed(message: str, tokens: int) -> Ending:
    """The engine could not go on."""
    return Ending("error", "length", tokens, EngineFailed(message))


def lost(reason: str, tokens: int) -> Ending:
    """The engine is gone."""
    return failed(f"the model's engine failed: {reason}", tokens)


def cancelled(tokens: int) -> Ending:
    """The consumer left first."""
    return Ending("cancelled", "length", tokens)


def withdrawn(tokens: int) -> Ending:
    """An operator ended it."""
    return Ending("cancelled", "length", tokens, Withdrawn("an operator ended the request"))


def timed_out(tokens: int, *, runs: bool, error: TimedOut) -> Ending:
    """The request ceiling came: partial text, or an error if it still waited."""
    return Ending("length", "length", tokens) if runs else Ending("error", "length", 0, error)


def drained(tokens: int, *, runs: bool, error: Draining) -> Ending:
    """The drain's deadline came: partial text, or an error if it still waited."""
    return Ending("drained", "length", tokens, None if runs else error)
