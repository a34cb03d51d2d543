"""Traces, as a collector gets them from a real daemon."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from mlxd.config import load
from mlxd.errors import ConfigError
from tests.daemon.process import Place

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest()
        message.ParseFromString(await request.read())
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """On a free port."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    await runner.cleanup()


def attributes(span: Span) -> dict[str, object]:
    """By name, each in its own type."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def test_a_request_is_a_span_with_its_parts_below(tmp_path: Path, collector: Collector):
    """Queue, prefill and decode follow each other inside of it; the caller's trace goes on."""
    place = Place(tmp_path)
    place.write(more=f'[traces]\nendpoint = "{collector.url}"')
    async with place.serving() as daemon:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        url = f"{daemon.base}/v1/completions"
        async with daemon.client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
        async with daemon.client.post(url, json={"model": "other"}) as answer:
            assert answer.status == 400
        assert await daemon.status("/readyz") == 200
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 0

    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    request = spans.pop("POST /v1/completions")
    assert list(spans) == ["queue", "prefill", "decode"]
    assert request.parent_span_id.hex() == CALLER
    facts = attributes(request)
    assert facts["http.response.status_code"] == 200
    assert facts["gen_ai.request.model"] == "tiny"
    assert facts["gen_ai.usage.output_tokens"] == 5
    assert (facts["mlxd.lane"], facts["mlxd.outcome"]) == ("batch", "length")
    moment = request.start_time_unix_nano
    for span in spans.values():
        assert span.parent_span_id == request.span_id
        assert moment <= span.start_time_unix_nano <= span.end_time_unix_nano
        moment = span.start_time_unix_nano
    assert moment <= request.end_time_unix_nano

    (refused,) = [span for span in collector.spans if span.trace_id.hex() != TRACE]
    assert attributes(refused)["http.response.status_code"] == 400


async def test_a_collector_that_is_gone_costs_no_request(tmp_path: Path):
    """Nor does it hold the end."""
    place = Place(tmp_path)
    place.write(more='[traces]\nendpoint = "http://127.0.0.1:9/v1/traces"')
    async with place.serving() as daemon:
        assert (await daemon.complete()).status == 200
        daemon.signal(signal.SIGTERM)
        assert await asyncio.wait_for(daemon.ended(within=15), 20) == 0


async def test_the_endpoints_secrets_are_told_nowhere(tmp_path: Path):
    """Neither in the configuration nor in the log, also where it cannot be reached."""
    place = Place(tmp_path)
    place.write(more='[traces]\nendpoint = "http://me:hunter2@127.0.0.1:9/v1/traces?token=hunter3"')
    async with place.serving() as daemon:
        await daemon.complete()
        async with daemon.client.get(f"{daemon.base}/admin/config") as answer:
            shown = (await answer.json())["settings"]["traces"]["endpoint"]
        daemon.signal(signal.SIGTERM)
        await asyncio.wait_for(daemon.ended(within=15), 20)

    assert shown == "http://***@127.0.0.1:9/v1/traces?***"
    assert "hunter" not in json.dumps(daemon.log)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "http://me:hunter2@[x/", "ftp://hunter2@a"])
def test_an_endpoint_must_be_one(tmp_path: Path, endpoint: str):
    """By its key and line, before anything starts, and without what may be a password."""
    file = tmp_path / "mlxd.toml"
    file.write_text(f'[traces]\nendpoint = "{endpoint}"\n[models.a]\nsource = "o/a"\n')

    with pytest.raises(ConfigError, match=r"mlxd.toml:2: traces.endpoint: expected an http") as no:
        load(file, {})
    assert "hunter" not in str(no.value)
