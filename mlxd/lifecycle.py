"""Where a model is in its life."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """A model's state, as status and metrics name it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
