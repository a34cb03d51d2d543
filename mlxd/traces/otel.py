"""Requests as spans, sent by OTLP over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mlxd import __version__
from mlxd.serving import Timings
from mlxd.traces import Story, Tell

SERVICE = "mlxd"
#: Seconds that a collector may take for a batch, also at the end.
PATIENCE = 5.0
#: Attributes that OpenTelemetry has names for; the other facts are mlxd's own.
_CONVENTIONS = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}

Attribute = str | int | float | bool


@contextmanager
def exported(endpoint: str) -> Iterator[Tell]:
    """What to tell requests to; at the end, what has not been sent yet is sent."""
    resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # It sends from a thread of its own, and drops spans rather than wait for a collector.
    exporter = OTLPSpanExporter(endpoint, timeout=PATIENCE)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Storyteller(provider.get_tracer(SERVICE, __version__)).tell
    finally:
        provider.shutdown()


class Storyteller:
    """Makes spans of stories."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def tell(self, story: Story) -> None:
        """One span for the request, below its caller's, and one for each part it came to."""
        nanoseconds = _wall_clock()
        caller = TraceContextTextMapPropagator().extract(
            {name.lower(): value for name, value in story.headers.items()}
        )
        name = story.method if story.route is None else f"{story.method} {story.route}"
        span = self._tracer.start_span(
            name,
            context=caller,
            kind=SpanKind.SERVER,
            attributes=_attributes(story),
            start_time=nanoseconds(story.started),
        )
        if story.status is not None and story.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        if story.timings is not None:
            self._tell_parts(story.timings, set_span_in_context(span), nanoseconds)
        span.end(end_time=nanoseconds(story.ended))

    def _tell_parts(
        self, timings: Timings, parent: Context, nanoseconds: Callable[[float], int]
    ) -> None:
        start = timings.admitted
        for part, seconds in (
            ("queue", timings.queue),
            ("prefill", timings.prefill),
            ("decode", timings.decode),
        ):
            if seconds is None:
                return
            span = self._tracer.start_span(part, context=parent, start_time=nanoseconds(start))
            start += seconds
            span.end(end_time=nanoseconds(start))


def _attributes(story: Story) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {"http.request.method": story.method}
    if story.route is not None:
        found["http.route"] = story.route
    if story.status is not None:
        found["http.response.status_code"] = story.status
    for name, value in story.facts.items():
        if isinstance(value, str | int | float | bool):
            found[_CONVENTIONS.get(name, f"mlxd.{name}")] = value
    return found


def _wall_clock() -> Callable[[float], int]:
    """Unix nanoseconds of moments on the event loop's clock."""
    offset = time.time() - asyncio.get_running_loop().time()
    return lambda moment: int((offset + moment) * 1e9)
