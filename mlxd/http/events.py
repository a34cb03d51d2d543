"""What happens to a request, in order: one type for all protocols to encode.

`Admitted`, any number of `Delta`s, `Done`; or an exception instead of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd.serving import Outcome
from mlxd.text.stream import Delta
from mlxd.wire import Lane

__all__ = ["Admitted", "Delta", "Done", "Event"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """It has a place in its model's waiting order."""

    model: str  # its id
    lane: Lane
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """It has ended well; all its text is out."""

    outcome: Outcome


Event = Admitted | Delta | Done
