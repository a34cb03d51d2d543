"""The description of the API, and what requests made from it do to a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode, Response

from mlxd.http.openapi import BODIES, OTHERS, document
from mlxd.text.tokenizer import Tokenizer
from tests.http.fakes import MODEL, FakeGateway, directory, says, serving

SCHEMA: Any = schemathesis.openapi.from_dict(document())
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
WITH_BODIES = [operation for operation in OPERATIONS if operation.path in BODIES]
# The same ones every time: a run must not depend on its luck. `max_examples` is for hunting.
EXAMPLES = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def url(marked: Tokenizer) -> Iterator[str]:
    """A server in a thread of its own, as schemathesis waits for its answers."""
    started = threading.Event()
    told: list[Any] = []

    async def serve() -> None:
        ended = asyncio.Event()
        async with serving(directory(marked, FakeGateway(says([500, 501])))) as address:
            told.extend([address, asyncio.get_running_loop(), ended])
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    address, loop, ended = told
    yield address
    loop.call_soon_threadsafe(ended.set)
    thread.join()


def test_every_public_route_is_described(url: str) -> None:
    """By its path and method, from the models that parse it; it is served as it is made."""
    served = requests.get(f"{url}/openapi.json", timeout=5).json()
    assert served == document()
    assert set(served["paths"]) == set(BODIES) | set(OTHERS)
    for path, (kind, _streams) in BODIES.items():
        body = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["$ref"].endswith(f"/{kind.__name__}")


def ask(url: str, case: Case[Any]) -> Response:
    """Send a generated request, to the model that there is where it names any."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    return case.call(base_url=url, timeout=20)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_what_the_description_allows_is_never_a_failure_of_the_server(
    url: str, operation: Any
) -> None:
    """Served or refused; the values are the client's, the limits the model's."""

    @EXAMPLES
    @given(case=operation.as_strategy())
    def check(case: Case[Any]) -> None:
        assert ask(url, case).status_code < 500

    check()


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda operation: operation.label)
def test_what_the_description_forbids_is_never_a_failure_of_the_server(
    url: str, operation: Any
) -> None:
    """Wrong types, missing fields, values out of range."""

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Case[Any]) -> None:
        assert ask(url, case).status_code < 500

    check()
