"""Whether a request gets a place, and in which lane."""

from __future__ import annotations

from collections.abc import Sequence

from mlxd.errors import BadRequest, QueueFull
from mlxd.gateway.ledger import Ledger
from mlxd.gateway.terms import Terms
from mlxd.gateway.waiting import startable
from mlxd.memory import row_needs
from mlxd.policy import Reject, Take, decide, model_traits
from mlxd.serving import Generation
from mlxd.wire import Capabilities, Lane


def choose_lane(
    generation: Generation, terms: Terms, capabilities: Capabilities, ledger: Ledger
) -> Take:
    """What the policy says. Raises BadRequest where it rejects the request."""
    traits = generation.traits | model_traits(capabilities)
    answer = decide(traits, terms.policy, terms.batch.width, capabilities)
    ledger.decided(answer)
    if isinstance(answer, Reject):
        raise BadRequest(
            f"this model's policy rejects requests with the trait {answer.trait!r}",
            param=answer.trait,
            code="rejected_by_policy",
        )
    return answer


def check_memory(generation: Generation, capabilities: Capabilities, kv_budget: int | None) -> None:
    """Refuse what could never fit, not even alone.

    Args:
        kv_budget: bytes; None = none is known.

    Raises:
        BadRequest: with the figures.
    """
    prompt, most = len(generation.prompt), generation.max_tokens
    needed = row_needs(capabilities.row_bytes, prompt, most)
    if kv_budget is not None and needed > kv_budget:
        raise BadRequest(
            f"{prompt} prompt tokens and up to {most} more take {needed} bytes of KV; "
            f"this model's share of the memory budget is {kv_budget}",
            param="max_tokens",
            code="exceeds_memory",
        )


def check_queue(
    running: Sequence[Lane], line: Sequence[Lane], terms: Terms, ledger: Ledger
) -> None:
    """Refuse the last of the line where more would wait than may.

    Args:
        running: lanes of the requests that hold a row.
        line: lanes of those that wait, next first, the new one last.

    Raises:
        QueueFull: it would be one too many.
    """
    queued = len(line) - startable(running, line, terms.batch.width)
    if queued > terms.batch.queue:
        raise QueueFull(
            f"{queued - 1} requests wait already; the limit is {terms.batch.queue}",
            retry_after=retry_after(line[-1], queued, terms, ledger),
        )


def retry_after(lane: Lane, queued: int, terms: Terms, ledger: Ledger) -> int:
    """Seconds until a line of this length has moved up."""
    return ledger.retry_after(queued, terms.batch.width if lane is Lane.BATCH else 1)
