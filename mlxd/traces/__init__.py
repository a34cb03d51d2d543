"""OpenTelemetry traces: one of each request, with its queue, prefill and decode.

Spans are made when a request has ended, from moments that were noted anyway, so
that a request costs nothing while it runs. The packages are the extra `otel`,
imported only where traces are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlxd.config import TracesSettings
from mlxd.serving import Timings


@dataclass(frozen=True, slots=True)
class Story:
    """One request that has ended. Moments are on the event loop's clock, in seconds."""

    method: str
    route: str | None  # its pattern; None where there is none
    status: int | None  # None = the client left before there was one
    headers: Mapping[str, str]
    started: float
    ended: float
    timings: Timings | None  # None = it was not admitted
    facts: Mapping[str, object] = field(default_factory=dict)


#: Told of every request; must not fail and not wait.
Tell = Callable[[Story], None]


@contextmanager
def traced(settings: TracesSettings) -> Iterator[Tell | None]:
    """What to tell requests to; at the end, what has not been sent yet is sent."""
    if settings.endpoint is None:
        yield None
        return
    from mlxd.traces.otel import exported  # noqa: PLC0415 - an extra, and slow to import

    with exported(settings.endpoint) as tell:
        yield tell
