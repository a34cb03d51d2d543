"""What every handler of the application may reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from mlxd.config import ServerSettings
from mlxd.serving import Directory, Outcome


@dataclass(frozen=True, slots=True)
class Context:
    """The application's ports. `server` is read for each request: a reload changes it."""

    directory: Directory
    server: Callable[[], ServerSettings]


@dataclass(slots=True)
class Record:
    """What the log line of one request will say; written by whoever learns a fact."""

    request_id: str
    started: float  # on the event loop's clock
    facts: dict[str, object] = field(default_factory=dict)
    first_token: float | None = None

    def ended(self, outcome: Outcome) -> None:
        """An admitted request has ended, in whatever way."""
        self.facts.update(
            outcome=outcome.name,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            completion_tokens=outcome.completion_tokens,
        )


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
RECORD: web.RequestKey[Record] = web.RequestKey("record", Record)
