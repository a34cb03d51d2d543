"""The application around the routes: ids, envelopes, hosts, origins, probes, log lines."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from mlxd.config import ServerSettings
from mlxd.errors import BadRequest, Draining, EngineFailed, MlxdError, ModelNotReady, QueueFull
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeDirectory, FakeGateway, directory, says, serving

BODY: dict[str, Any] = {"model": MODEL, "prompt": "Say:"}
JSON = {"content-type": "application/json"}
SERVER = ServerSettings(max_body=2 * 2**20, hosts=("models.lan",), origins=("https://app.example",))


async def broken(_: web.Request) -> web.Response:
    """A handler with a fault."""
    raise ZeroDivisionError("secret")


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    """Ask for a completion and read whatever comes."""
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()


@pytest.fixture
async def models(tokenizer: Tokenizer) -> FakeDirectory:
    """One model that says hi, and one that still loads."""
    found = directory(tokenizer, FakeGateway(says(await tokenizer.encode("hi"))))
    found.not_ready["loading"] = ModelNotReady("it loads", retry_after=5)
    found.aliases["org/soon"] = "loading"
    return found


@pytest.fixture
async def url(models: FakeDirectory) -> AsyncIterator[str]:
    """Where it is served."""
    async with serving(models, SERVER, routes=[web.get("/broken", broken)]) as url:
        yield url


async def envelope(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error of a response, which must be an envelope."""
    assert response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_every_answer_has_a_request_id(url: str, http: aiohttp.ClientSession) -> None:
    """The client's own when it is sane, else a new one."""
    for sent, kept in [("abc-1.2:3_4", True), ("two words", False), ("x" * 129, False)]:
        async with http.get(f"{url}/livez", headers={"x-request-id": sent}) as response:
            assert (response.headers["x-request-id"] == sent) is kept
    async with http.post(f"{url}/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["x-request-id"]
    async with http.get(f"{url}/nowhere") as response:
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/livez", 405),
        ("OPTIONS", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/loading/", 404),
        ("GET", "/broken", 500),
        ("GET", "/readyz?model=nobody", 404),
    ],
)
async def test_every_failure_is_an_envelope(
    url: str, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    """aiohttp's own too; nothing of an unexpected error's insides is told."""
    async with http.request(method, url + path) as response:
        assert response.status == status
        assert "secret" not in (await envelope(response))["message"]
        assert ("allow" in response.headers) is (status == 405)


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({"content-type": "text/plain"}, json.dumps(BODY).encode()),
        ({"content-type": "application/x-www-form-urlencoded"}, json.dumps(BODY).encode()),
        (JSON, b"{"),
        (JSON, b""),
        (JSON, b"\xff"),
        (JSON | {"content-encoding": "gzip"}, b"this is not gzip"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(
    url: str, http: aiohttp.ClientSession, headers: dict[str, str], data: bytes
) -> None:
    """400 in the envelope, whatever is wrong with it."""
    async with http.post(
        f"{url}/v1/completions", data=data, headers=headers, compress=False
    ) as response:
        assert response.status == 400
        await envelope(response)


async def test_a_large_body_is_served_and_one_over_the_limit_is_413(
    url: str, http: aiohttp.ClientSession
) -> None:
    """With a declared length and without."""

    async def chunks(data: bytes) -> AsyncIterator[bytes]:
        yield data

    for size, status in [(1_300_000, 200), (3_000_000, 413)]:
        data = json.dumps(BODY | {"user": "x" * size}).encode()
        for sent in (io.BytesIO(data), chunks(data)):
            async with http.post(f"{url}/v1/completions", data=sent, headers=JSON) as response:
                assert response.status == status
                if status == 413:
                    assert (await envelope(response))["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("models.lan:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.5", 403),
        ("[::1", 403),
    ],
)
async def test_foreign_hosts_are_refused(
    url: str, http: aiohttp.ClientSession, host: str, status: int
) -> None:
    """A page that re-points its own name at the listener gets nothing."""
    async with http.get(f"{url}/v1/models", headers={"host": host}) as response:
        assert response.status == status


async def test_foreign_origins_are_refused(url: str, http: aiohttp.ClientSession) -> None:
    """Before the request does anything; the listener's own pages are not foreign."""
    for origin, status in [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("https://app.example", 200),
        (url, 200),
    ]:
        async with http.post(
            f"{url}/v1/completions", json=BODY, headers={"origin": origin}
        ) as response:
            assert response.status == status


async def test_accepted_origins_get_cors(url: str, http: aiohttp.ClientSession) -> None:
    """The preflight is answered, and the page may read the answer, streams too."""
    headers = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, x-stainless-os",
    }
    async with http.options(f"{url}/v1/completions", headers=headers) as response:
        assert response.status == 204
        assert "x-stainless-os" in response.headers["access-control-allow-headers"]
        assert response.headers["access-control-allow-origin"] == "https://app.example"
    async with http.post(
        f"{url}/v1/completions",
        json=BODY | {"stream": True},
        headers={"origin": "https://app.example"},
    ) as response:
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-mlxd-lane" in response.headers["access-control-expose-headers"]


async def test_probes_tell_the_state_and_nothing_else(
    url: str, http: aiohttp.ClientSession, models: FakeDirectory
) -> None:
    """Of the daemon, and of one model."""

    async def status(path: str) -> int:
        async with http.get(url + path) as response:
            assert set(await response.json()) == {"status"}
            return response.status

    paths = ["/livez", "/readyz", "/health", f"/readyz?model={MODEL}", "/readyz?model=loading"]
    assert [await status(path) for path in paths] == [200, 200, 200, 200, 503]
    models.is_ready = False
    assert [await status(path) for path in paths] == [200, 503, 503, 200, 503]


@pytest.mark.parametrize(
    "accept", ["", "*/*", "application/openmetrics-text; version=1.0.0", "x; version=one"]
)
async def test_metrics_are_plain_text_whatever_is_asked_for(
    models: FakeDirectory, http: aiohttp.ClientSession, accept: str
) -> None:
    """OpenMetrics would turn a name's colon into an underscore; every Prometheus reads text."""
    registry = CollectorRegistry()
    Counter("vllm:things", "With a colon.", registry=registry).inc()
    async with (
        serving(models, registry=registry) as url,
        http.get(f"{url}/metrics", headers={"accept": accept}) as response,
    ):
        assert response.status == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "vllm:things_total 1.0" in await response.text()


async def test_metrics_are_those_of_the_registry(
    models: FakeDirectory, http: aiohttp.ClientSession
) -> None:
    """In the text format's content type; two applications do not share anything."""
    registry = CollectorRegistry()
    Counter("mlxd_things", "Things.", registry=registry).inc()
    async with (
        serving(models, registry=registry) as url,
        serving(models) as other,
        http.get(f"{url}/metrics") as response,
        http.get(f"{other}/metrics") as nothing,
    ):
        assert response.headers["content-type"].startswith("text/plain; version=")
        assert "mlxd_things_total 1.0" in await response.text()
        assert "mlxd_things" not in await nothing.text()


async def test_models_that_do_not_serve_yet_are_listed(
    url: str, http: aiohttp.ClientSession
) -> None:
    """By their ids, aliases with slashes too; asking one is 503 with Retry-After."""
    async with http.get(f"{url}/v1/models") as response:
        assert [each["id"] for each in (await response.json())["data"]] == [MODEL, "loading"]
    async with http.get(f"{url}/v1/models/org/soon") as response:
        assert (await response.json())["id"] == "loading"
    async with http.post(f"{url}/v1/completions", json=BODY | {"model": "loading"}) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "5")


async def test_every_request_leaves_one_line_in_the_log(
    url: str, http: aiohttp.ClientSession
) -> None:
    """With its id, model, lane, tokens, timings and outcome; probes are quiet."""
    with capture_logs() as lines:
        for stream in (False, True):
            async with http.post(
                f"{url}/v1/completions",
                json=BODY | {"stream": stream},
                headers={"x-request-id": "r1"},
            ) as response:
                await response.read()
        async with http.get(f"{url}/livez"), http.get(f"{url}/broken"):
            pass
    whole, streamed, probe, fault, failed = lines
    for line in (whole, streamed):
        assert (line["id"], line["status"], line["model"]) == ("r1", 200, MODEL)
        assert (line["lane"], line["reason"], line["outcome"]) == ("batch", "none", "stop")
        assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 2)
        assert line["seconds"] >= line["first_token_seconds"] >= 0
    assert probe["log_level"] == "debug"
    assert (fault["log_level"], fault["exc_info"]) == ("error", True)
    assert (failed["status"], failed["outcome"]) == (500, "error")


async def test_a_client_that_leaves_is_no_error_in_the_log(
    tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """Its line says cancelled."""

    async def never(_: object) -> AsyncIterator[list[int]]:
        await asyncio.Event().wait()
        yield []

    gateway = FakeGateway(never)  # type: ignore[arg-type]
    with capture_logs() as lines:
        async with serving(directory(tokenizer, gateway)) as url:
            asked = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=BODY))
            await gateway.admitted.wait()
            asked.cancel()
            await asyncio.wait_for(gateway.tickets[0].left.wait(), 5)
    assert [(line["log_level"], line["outcome"], line["status"]) for line in lines] == [
        ("info", "cancelled", None)
    ]
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (2, 0)


@pytest.mark.parametrize(
    "error", [QueueFull("256 wait"), Draining("it drains"), BadRequest("no such trait")]
)
async def test_refusals_are_rejected_in_the_log_whatever_their_status(
    tokenizer: Tokenizer, http: aiohttp.ClientSession, error: MlxdError
) -> None:
    """As in the metric; the line names the model that refused."""
    gateway = FakeGateway(says([]), refuse=error)
    with capture_logs() as lines:
        async with serving(directory(tokenizer, gateway)) as url:
            for stream in (False, True):
                await post(http, url, BODY | {"stream": stream})
    assert [(line["outcome"], line["error"], line["model"]) for line in lines] == [
        ("rejected", error.code, MODEL)
    ] * 2


@pytest.mark.parametrize(
    ("error", "outcome"), [(Draining("the deadline came"), "drained"), (EngineFailed("x"), "error")]
)
async def test_an_admitted_request_has_its_own_outcome_in_the_log(
    tokenizer: Tokenizer, http: aiohttp.ClientSession, error: MlxdError, outcome: str
) -> None:
    """Its ticket's, whatever the answer's status; with the tokens that it got that far."""
    (token,) = await tokenizer.encode("hi")

    async def cut(_: object) -> AsyncIterator[list[int]]:
        yield [token]
        raise error

    gateway = FakeGateway(cut)  # type: ignore[arg-type]
    with capture_logs() as lines:
        async with serving(directory(tokenizer, gateway)) as url:
            for stream in (False, True):
                await post(http, url, BODY | {"stream": stream})
    told = [(line["outcome"], line["error"], line["completion_tokens"]) for line in lines]
    assert told == [(outcome, error.code, 1)] * 2
    assert [line["status"] for line in lines] == [503, 200]
