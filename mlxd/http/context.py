"""What every handler of the application may reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from mlxd.config import ServerSettings
from mlxd.http.auth import Access
from mlxd.http.events import Usage
from mlxd.serving import ANYBODY, Caller, Directory, Outcome, Timings
from mlxd.traces import Tell


@dataclass(frozen=True, slots=True)
class Context:
    """The application's ports. `server` and `access` are read for each request: a reload
    changes them.
    """

    directory: Directory
    server: Callable[[], ServerSettings]
    access: Callable[[], Access]
    tell: Tell | None = None  # traces; None = nobody wants them


@dataclass(slots=True)
class Record:
    """What the log line of one request will say; written by whoever learns a fact."""

    request_id: str
    started: float  # on the event loop's clock
    caller: Caller = ANYBODY
    facts: dict[str, object] = field(default_factory=dict)
    first_token: float | None = None
    timings: Timings | None = None

    def ended(self, outcomes: Sequence[Outcome], answers: int) -> None:
        """An admitted request has ended, in whatever way.

        Args:
            outcomes: of all its answers; the first one's timings stand for all.
            answers: to each of its prompts.
        """
        names = list(dict.fromkeys(outcome.name for outcome in outcomes))
        usage = Usage.of(outcomes, answers)
        self.facts.update(
            outcome=",".join(names),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self.timings = outcomes[0].timings


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
RECORD: web.RequestKey[Record] = web.RequestKey("record", Record)
