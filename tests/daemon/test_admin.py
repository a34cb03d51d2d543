"""The admin API over HTTP: strict in, JSON out, acting through a port."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient
from prometheus_client import CollectorRegistry

from mlxd.config import ServerSettings
from mlxd.errors import ConfigError, Conflict, NotFound, PreconditionFailed
from mlxd.http.admin import admin_routes
from mlxd.http.app import make_app
from mlxd.operations import (
    Configuration,
    DaemonStatus,
    DrainReport,
    LaneCounts,
    LiveRequests,
    ModelStatus,
    RequestStatus,
)
from mlxd.plan import Plan
from mlxd.serving import Identity, Served

MODEL = ModelStatus(
    id="tiny",
    aliases=("default",),
    source="/models/tiny",
    state="ready",
    reason=None,
    width=4,
    running=LaneCounts(batch=2),
    waiting=LaneCounts(serial=1),
    phase=None,
    engine=None,
    capabilities=None,
    kv_bytes=1,
    kv_budget_bytes=9,
    prefix_cache_bytes=2,
    peak_bytes=8,
    weight_bytes=2,
    working_bytes=1,
    restarts=0,
)
CONFIGURATION = Configuration("abc", {"models": {}}, ["models.tiny.batch.width"])
REQUEST = RequestStatus("r1", "tiny", "alice", "batch", "none", "running", 1.5, 3, 7)


class FakeOperations:
    """Notes what it is asked, answers what it is told to; also an empty directory."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.report = DrainReport("drained", {"tiny": LiveRequests(0, 0)})
        self.problem: Exception | None = None

    def status(self) -> DaemonStatus:
        """Of one model."""
        return DaemonStatus("ready", "1", "abc", reloading=False, models=[MODEL])

    async def drain(self, model: str | None, *, timeout: float | None, wait: bool) -> DrainReport:
        """As told."""
        self._note("drain", model, timeout, wait)
        return self.report

    def resume(self, model: str | None) -> DaemonStatus:
        """As told."""
        self._note("resume", model)
        return self.status()

    async def reload(self, *, dry_run: bool) -> Plan:
        """As told."""
        self._note("reload", dry_run)
        return Plan(add=("new",), retune={"tiny": ("batch.width",)})

    def config(self) -> Configuration:
        """As told."""
        return CONFIGURATION

    async def patch(
        self, model: str, table: str, changes: Mapping[str, object], match: Sequence[str] | None
    ) -> Configuration:
        """As told."""
        self._note("patch", model, table, dict(changes), match)
        return CONFIGURATION

    async def load(self, model: str) -> ModelStatus:
        """As told."""
        self._note("load", model)
        return MODEL

    async def unload(self, model: str) -> ModelStatus:
        """As told."""
        self._note("unload", model)
        return MODEL

    async def restart(self, model: str) -> ModelStatus:
        """As told."""
        self._note("restart", model)
        return MODEL

    def clear_cache(self, model: str) -> None:
        """As told."""
        self._note("clear_cache", model)

    def requests(self) -> list[RequestStatus]:
        """One."""
        return [REQUEST]

    def cancel(self, request_id: str) -> int:
        """As told."""
        self._note("cancel", request_id)
        return 2

    def _note(self, *call: object) -> None:
        self.asked.append(call)
        if self.problem is not None:
            raise self.problem

    def model_ids(self) -> list[str]:
        """None."""
        return []

    def identify(self, name: str) -> Identity:
        """Never."""
        raise NotFound(name)

    def using(self, name: str) -> AbstractContextManager[Served]:
        """Never."""
        raise NotFound(name)

    def ready(self, name: str | None = None) -> bool:
        """Never."""
        return name is not None


Client = TestClient[web.Request, web.Application]


@pytest.fixture
def operations() -> FakeOperations:
    """What is acted through."""
    return FakeOperations()


@pytest.fixture
async def client(
    operations: FakeOperations,
    aiohttp_client: Callable[[web.Application], Awaitable[Client]],
) -> Client:
    """A client of the whole application."""
    app = make_app(
        operations,
        server=ServerSettings,
        registry=CollectorRegistry(),
        extra_routes=admin_routes(operations),
    )
    return await aiohttp_client(app)


async def error_of(answer: ClientResponse) -> dict[str, Any]:
    """The envelope's content."""
    error: dict[str, Any] = (await answer.json())["error"]
    return error


async def test_status_is_one_snapshot_in_json(client: Client):
    """State, lanes and memory of the daemon and of every model."""
    answer = await client.get("/admin/status")

    body = await answer.json()
    assert answer.status == 200
    assert (body["state"], body["config_etag"]) == ("ready", "abc")
    (model,) = body["models"]
    assert model["running"] == {"batch": 2, "serial": 0}
    assert model["waiting"] == {"batch": 0, "serial": 1}
    assert (model["id"], model["width"], model["restarts"]) == ("tiny", 4, 0)


async def test_empty_body_means_every_default(client: Client, operations: FakeOperations):
    """`curl -X POST` is enough for the whole daemon."""
    for call in ("drain", "resume", "reload"):
        assert (await client.post(f"/admin/{call}")).status == 200

    assert operations.asked == [
        ("drain", None, None, True),
        ("resume", None),
        ("reload", False),
    ]


@pytest.mark.parametrize(("timeout", "seconds"), [(1.5, 1.5), (2, 2.0), ("1m", 60.0), (None, None)])
async def test_drain_passes_on_what_was_asked(
    client: Client, operations: FakeOperations, timeout: object, seconds: float | None
):
    """Model, wait and a timeout in seconds or as a duration."""
    body = {"model": "tiny", "timeout": timeout, "wait": True}
    answer = await client.post("/admin/drain", json=body)

    assert operations.asked == [("drain", "tiny", seconds, True)]
    assert await answer.json() == {
        "state": "drained",
        "models": {"tiny": {"running": 0, "waiting": 0}},
    }


@pytest.mark.parametrize(("wait", "status"), [(True, 504), (False, 202)])
async def test_unfinished_drain_tells_what_runs(
    client: Client, operations: FakeOperations, wait: bool, status: int
):
    """504 at the timeout, 202 to whoever did not want to wait."""
    operations.report = DrainReport("draining", {"tiny": LiveRequests(2, 1)})

    answer = await client.post("/admin/drain", json={"wait": wait})

    assert answer.status == status
    assert (await answer.json())["models"] == {"tiny": {"running": 2, "waiting": 1}}


async def test_reload_answers_with_the_plan(client: Client):
    """What would change, or has changed, and why."""
    answer = await client.post("/admin/reload", json={"dry_run": True})

    body = await answer.json()
    assert body["dry_run"] is True
    assert (body["plan"]["add"], body["plan"]["retune"]) == (["new"], {"tiny": ["batch.width"]})


async def test_bad_file_is_422_with_every_problem(client: Client, operations: FakeOperations):
    """All that is wrong with it, at once."""
    operations.problem = ConfigError(["one", "two"])

    answer = await client.post("/admin/reload")

    assert answer.status == 422
    assert (await answer.json())["problems"] == ["one", "two"]
    assert "one\ntwo" in (await error_of(answer))["message"]


@pytest.mark.parametrize(("error", "status"), [(NotFound("no"), 404), (Conflict("no"), 409)])
async def test_refusals_keep_their_status(
    client: Client, operations: FakeOperations, error: Exception, status: int
):
    """What the supervisor refuses is the client's error, in the envelope."""
    operations.problem = error

    answer = await client.post("/admin/resume", json={"model": "x"})

    assert answer.status == status
    assert (await error_of(answer))["message"] == "no"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"x"',
        b'{"model": 1}',
        b'{"wait": "yes"}',
        b'{"wait": 1}',
        b'{"timeout": -1}',
        b'{"timeout": 1e300}',
        b'{"timeout": "soon"}',
        b'{"timeout": true}',
        b'{"timeuot": 1}',
        b'{"wait": true, "wait": false}',
        b"\xff",
    ],
)
async def test_drain_takes_nothing_but_what_it_knows(
    client: Client, operations: FakeOperations, body: bytes
):
    """A typo must not drain everything for the default time."""
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/admin/drain", data=body, headers=headers)

    assert answer.status == 400
    assert (await error_of(answer))["type"] == "invalid_request_error"
    assert operations.asked == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_bodies_that_a_foreign_page_could_send_are_refused(
    client: Client, operations: FakeOperations, kind: str
):
    """Only JSON says that it is JSON: a browser asks before it sends that elsewhere."""
    answer = await client.post("/admin/drain", data=b"{}", headers={"Content-Type": kind})

    assert answer.status == 400
    assert operations.asked == []


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via"])
async def test_requests_through_a_proxy_are_refused(
    client: Client, operations: FakeOperations, header: str
):
    """An open /admin is for this machine; a proxy would open it to others."""
    answer = await client.post("/admin/drain", headers={header: "203.0.113.9"})

    assert answer.status == 403
    assert operations.asked == []


async def test_endless_body_is_refused(client: Client):
    """No admin call needs more than a few kilobytes."""
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/admin/drain", data=b" " * 100_000, headers=headers)

    assert answer.status == 413


async def test_config_has_its_etag(client: Client):
    """The header is what a change can be made to depend on."""
    answer = await client.get("/admin/config")

    assert answer.headers["ETag"] == '"abc"'
    assert (await answer.json())["differs_from_file"] == ["models.tiny.batch.width"]


@pytest.mark.parametrize(
    ("header", "etags"),
    [
        (None, None),
        ("*", None),
        ('"abc"', ["abc"]),
        ('"abc", "def"', ["abc", "def"]),
        ('W/"abc"', []),
    ],
)
async def test_live_change_passes_on_what_it_depends_on(
    client: Client, operations: FakeOperations, header: str | None, etags: list[str] | None
):
    """A weak etag never matches."""
    headers = {} if header is None else {"If-Match": header}
    answer = await client.patch("/admin/models/tiny/batch", json={"width": 8}, headers=headers)

    assert (answer.status, answer.headers["ETag"]) == (200, '"abc"')
    assert operations.asked == [("patch", "tiny", "batch", {"width": 8}, etags)]


@pytest.mark.parametrize(
    ("error", "status"),
    [(PreconditionFailed("no"), 412), (ConfigError(["no"]), 422), (Conflict("no"), 409)],
)
async def test_refused_live_changes_keep_their_status(
    client: Client, operations: FakeOperations, error: Exception, status: int
):
    """Another etag, values that cannot be, a daemon that stops."""
    operations.problem = error

    answer = await client.patch("/admin/models/tiny/policy", json={"seed": "batch"})

    assert answer.status == status
    assert (await error_of(answer))["message"] == "no"


@pytest.mark.parametrize("call", ["load", "unload", "restart"])
async def test_a_models_engine_comes_and_goes(
    client: Client, operations: FakeOperations, call: str
):
    """Names with a slash are names, too; the answer is the model's status."""
    answer = await client.post(f"/admin/models/org/name/{call}")

    assert (await answer.json())["id"] == "tiny"
    assert operations.asked == [(call, "org/name")]


async def test_cache_is_cleared(client: Client, operations: FakeOperations):
    """Of one model."""
    answer = await client.post("/admin/models/tiny/cache/clear")

    assert await answer.json() == {"cleared": "tiny"}
    assert operations.asked == [("clear_cache", "tiny")]


async def test_calls_that_take_nothing_refuse_a_body(client: Client, operations: FakeOperations):
    """An option that does nothing would be believed."""
    answer = await client.post("/admin/models/tiny/unload", json={"timeout": 5})

    assert answer.status == 400
    assert operations.asked == []


async def test_requests_are_listed_and_ended(client: Client, operations: FakeOperations):
    """By the id that every answer has in its header."""
    listed = await (await client.get("/admin/requests")).json()
    ended = await client.delete("/admin/requests/r1")

    assert listed["requests"][0]["id"] == "r1"
    assert await ended.json() == {"cancelled": 2}
    assert operations.asked == [("cancel", "r1")]


async def test_ui_is_a_page_that_runs_nothing_but_its_own_code(client: Client):
    """Its policy names its script and style by their hashes; it loads nothing from elsewhere."""
    answer = await client.get("/admin/ui")

    text = await answer.text()
    policy = answer.headers["Content-Security-Policy"]
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (answer.status, answer.content_type) == (200, "text/html")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "http" not in text


async def test_ui_calls_only_what_there_is(client: Client):
    """Every path in its script is answered by a route."""
    script = await (await client.get("/admin/ui")).text()
    calls = re.findall(r'call\("(\w+)", "(/admin/\w+)"', script)

    assert {path for _method, path in calls} == {
        "/admin/status",
        "/admin/requests",
        "/admin/drain",
        "/admin/resume",
        "/admin/reload",
    }
    for method, path in calls:
        assert (await client.request(method, path)).status == 200
