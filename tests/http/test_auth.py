"""Who may call what, and what nobody is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from mlxd.config import (
    AdminSettings,
    KeyRing,
    MetricsSettings,
    ModelSettings,
    Secret,
    ServerSettings,
    Settings,
    TokenFile,
    parse_keys,
)
from mlxd.errors import Forbidden, Unauthorized
from mlxd.http.auth import Access, Scope, identify, offered, scope_of
from mlxd.http.body import json_response
from mlxd.serving import ANYBODY
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeDirectory, FakeGateway, directory, says, serving

ALICE, BOB, TOKEN = "sk-alice-1", "sk-bob-2", "tok-admin-3"
KEYS = parse_keys("keys", f"alice:{ALICE}:2:5\nbob:{BOB}\n")
ADMIN_TOKEN = TokenFile("token", Secret(TOKEN))
CLOSED = Access(KEYS, ADMIN_TOKEN)
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Say:"}


async def admin_status(_: web.Request) -> web.Response:
    """Stands for every admin call."""
    return json_response({"state": "ready"})


@pytest.fixture
async def models(tokenizer: Tokenizer) -> FakeDirectory:
    """One model that says hi."""
    return directory(tokenizer, FakeGateway(says(await tokenizer.encode("hi"))))


@pytest.fixture
async def url(models: FakeDirectory) -> AsyncIterator[str]:
    """A listener that asks for keys, and under /admin for the token."""
    routes = [web.get("/admin/status", admin_status)]
    async with serving(models, routes=routes, access=CLOSED) as url:
        yield url


def bearer(secret: str) -> dict[str, str]:
    """As OpenAI's clients send it."""
    return {"Authorization": f"Bearer {secret}"}


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("DELETE", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/metrics/"),
    ("GET", "/livez/"),
    ("GET", "/nowhere"),
    ("GET", "/"),
]
ADMIN_ROUTES = [
    ("GET", "/admin/status"),
    ("POST", "/admin/status"),
    ("GET", "/admin"),
    ("GET", "/admin/"),
    ("GET", "/admin/status/"),
    ("GET", "//admin/status"),
    ("GET", "/ADMIN/status"),
    ("GET", "/%61dmin/status"),
    ("POST", "/admin/nowhere"),
]


@pytest.mark.parametrize("method_and_path", [*ROUTES, *ADMIN_ROUTES], ids=" ".join)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"Authorization": "Bearer "},
        {"Authorization": ALICE},
        {"Authorization": "Basic c2s6"},
        {"x-api-key": ""},
        {"x-api-key": f"{ALICE}x"},
        {"x-api-key": "\u00e9"},
    ],
)
async def test_nothing_is_served_without_a_key(
    url: str, http: aiohttp.ClientSession, method_and_path: tuple[str, str], headers: dict[str, str]
):
    """401 with the envelope and the challenge, for routes that there are not as well."""
    method, path = method_and_path
    with capture_logs() as lines:
        async with http.request(method, url + path, headers=headers) as answer:
            body = await answer.json()
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")

    assert body["error"]["code"] == "invalid_api_key"
    for secret in (ALICE, BOB, TOKEN):
        assert secret not in json.dumps(body) + json.dumps(lines)


@pytest.mark.parametrize("method_and_path", ADMIN_ROUTES, ids=" ".join)
async def test_a_key_opens_no_admin_route(
    url: str, http: aiohttp.ClientSession, method_and_path: tuple[str, str]
):
    """Who may ask models may not operate them: 403, whichever way the path is spelled."""
    method, path = method_and_path
    async with http.request(method, url + path, headers=bearer(ALICE)) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "forbidden"


@pytest.mark.parametrize("headers", [bearer(ALICE), {"x-api-key": BOB}])
async def test_either_header_carries_a_key(
    url: str, http: aiohttp.ClientSession, headers: dict[str, str]
):
    """OpenAI's clients send one, Anthropic's the other."""
    async with http.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer:
        assert answer.status == 200


async def test_the_token_opens_admin_and_metrics_and_no_model(
    url: str, http: aiohttp.ClientSession
):
    """It is no inference key."""
    statuses = {}
    for path in ("/admin/status", "/metrics", "/v1/models"):
        async with http.get(url + path, headers=bearer(TOKEN)) as answer:
            statuses[path] = answer.status

    assert statuses == {"/admin/status": 200, "/metrics": 200, "/v1/models": 401}


async def test_probes_need_no_key(url: str, http: aiohttp.ClientSession):
    """A load balancer has none."""
    for path in ("/livez", "/readyz", "/health"):
        async with http.get(url + path) as answer:
            assert answer.status == 200


async def test_the_log_line_names_the_key_and_not_its_text(
    url: str, http: aiohttp.ClientSession, models: FakeDirectory
):
    """Whose request it was; the gateway learns it, too, for the waiting line."""
    with capture_logs() as lines:
        async with http.post(
            f"{url}/v1/completions", json=BODY | {"priority": 5}, headers=bearer(ALICE)
        ) as answer:
            await answer.read()

    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["key"] == "alice"
    assert ALICE not in json.dumps(lines)
    gateway = models.served.gateway
    assert isinstance(gateway, FakeGateway)
    caller = gateway.generation.caller
    assert (caller.name, caller.weight, gateway.generation.priority) == ("alice", 2.0, 5)


async def test_a_priority_above_the_keys_own_is_refused(url: str, http: aiohttp.ClientSession):
    """400 that names the field; nobody is moved silently."""
    async with http.post(
        f"{url}/v1/completions", json=BODY | {"priority": 1}, headers=bearer(BOB)
    ) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "priority"


async def test_a_body_that_does_not_come_is_408(models: FakeDirectory):
    """A client that sends slowly cannot hold a handler for ever."""
    server = ServerSettings(receive_timeout=0.05)
    async with serving(models, server) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
        status = await asyncio.wait_for(reader.readline(), 5)
        writer.close()

    assert status.split()[1] == b"408"


async def test_headers_that_do_not_come_end_the_connection(models: FakeDirectory):
    """Neither silence nor a trickle of bytes keeps a connection open."""
    async with serving(models, ServerSettings(receive_timeout=0.05)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /livez HTTP/1.1\r\nHost: local")

        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


class TestRules:
    """The decision itself, without HTTP."""

    @pytest.mark.parametrize("scope", list(Scope))
    def test_an_open_daemon_asks_nobody(self, scope: Scope):
        """On loopback, where every caller is trusted."""
        assert identify(Access(), scope, None) is ANYBODY
        assert identify(Access(), scope, "anything") is ANYBODY

    def test_a_token_without_keys_guards_admin_alone(self):
        """Models stay open, on loopback; the operator does not."""
        access = Access(token=ADMIN_TOKEN)

        assert identify(access, Scope.API, None) is ANYBODY
        assert identify(access, Scope.METRICS, None) is ANYBODY
        with pytest.raises(Unauthorized):
            identify(access, Scope.ADMIN, None)

    def test_admin_elsewhere_leaves_no_hole_here(self):
        """With keys and no token, what looks like /admin on the public listener needs a key."""
        with pytest.raises(Unauthorized):
            identify(Access(KEYS), Scope.ADMIN, None)

    def test_metrics_can_be_open(self):
        """For a Prometheus that has no secret."""
        assert identify(Access(KEYS, metrics_open=True), Scope.METRICS, None) is ANYBODY
        with pytest.raises(Unauthorized):
            identify(Access(KEYS), Scope.METRICS, None)

    def test_a_key_is_forbidden_rather_than_unknown_to_admin(self):
        """Its holder learns that it is the wrong kind."""
        with pytest.raises(Forbidden):
            identify(CLOSED, Scope.ADMIN, BOB)

    def test_a_bearer_counts_before_the_other_header(self):
        """One request, one key."""
        assert offered({"Authorization": "bearer a", "x-api-key": "b"}) == "a"

    @pytest.mark.parametrize("path", ["/admin", "/admin/x", "//admin//x", "/Admin/x"])
    def test_whatever_looks_like_admin_is(self, path: str):
        """A proxy in front may normalise what aiohttp does not."""
        assert scope_of(path) is Scope.ADMIN
        assert scope_of("/administrators") is Scope.API

    def test_a_private_socket_is_guarded_by_its_mode(self):
        """Keys of the public listener do not lock the operator out; a token would."""
        models = {"tiny": ModelSettings(source="owner/tiny")}
        server = ServerSettings(api_keys_file=KEYS)
        own = AdminSettings(listen="unix:/run/mlxd/admin")
        assert Access.admin(Settings(server=server, admin=own, models=models)) == Access()

        own = AdminSettings(listen="unix:/run/mlxd/admin", token_file=ADMIN_TOKEN)
        metrics = MetricsSettings(open=True)
        settings = Settings(server=server, admin=own, metrics=metrics, models=models)
        assert Access.admin(settings) == Access(KEYS, ADMIN_TOKEN, metrics_open=True)


def test_no_secret_shows_itself():
    """A repr ends up in logs and tracebacks."""
    for thing in (KEYS, KEYS.keys[0], ADMIN_TOKEN, CLOSED, Secret(TOKEN)):
        assert not any(secret in repr(thing) for secret in (ALICE, BOB, TOKEN)), thing


def test_a_key_is_found_whole():
    """Neither a beginning nor more than it."""
    assert isinstance(KEYS, KeyRing)
    assert KEYS.find(ALICE) is KEYS.keys[0]
    assert KEYS.find(ALICE[:-1]) is None
    assert KEYS.find(ALICE + "x") is None
