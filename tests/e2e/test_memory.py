"""Two real engines under a budget that their load exceeds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import daemon

MODELS = ("one", "other")
#: Each of these rows begins in the first class, of 512 tokens, and grows into the second, where it
#: stays for so long that the other one must come there too, however late it began.
PROMPTS = [f"{number}: tell me more. " + "The sea is wide and deep. " * 60 for number in range(2)]
TOKENS = 160
#: Holds two rows of the first class beside one of the second, and not two of the second.
KV = 150_000_000


@pytest.mark.timeout(600)
async def test_rows_that_gave_way_end_with_the_text_of_an_undisturbed_one(
    starter_path: Path, tmp_path: Path
) -> None:
    """Memory runs short in both, nothing is refused, and each stays within its share."""
    models = "".join(
        f'[models.{model}]\nsource = "{starter_path}"\ncontext = 2048\n'
        f'[models.{model}.batch]\nkv_budget = "{KV}B"\nprefix_cache = "0B"\n'
        for model in MODELS
    )
    with daemon(tmp_path, models) as base:
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(base, timeout=timeout) as session:
            undisturbed = [await text(session, MODELS[0], prompt) for prompt in PROMPTS]
            before = {model["id"]: model for model in await status(session)}
            crowded = await asyncio.gather(
                *(text(session, model, prompt) for model in MODELS for prompt in PROMPTS)
            )
            assert crowded == undisturbed * len(MODELS)
            for model in await status(session):
                assert await counted(session, "mlxd_preemptions_total", model["id"]) > 0
                assert model["kv_budget_bytes"] == KV
                work = before[model["id"]]["working_bytes"]
                assert model["peak_bytes"] <= model["weight_bytes"] + work + KV


async def text(session: aiohttp.ClientSession, model: str, prompt: str) -> str:
    """A greedy answer of exactly so many tokens."""
    body = {"model": model, "temperature": 0, "max_tokens": TOKENS, "prompt": prompt}
    async with session.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    assert 400 < found["usage"]["prompt_tokens"] < 448
    assert found["usage"]["completion_tokens"] == TOKENS
    return str(found["choices"][0]["text"])


async def status(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """What the daemon says of its models."""
    async with session.get("/admin/status") as answer:
        models: list[dict[str, Any]] = (await answer.json())["models"]
        return models


async def counted(session: aiohttp.ClientSession, name: str, model: str) -> float:
    """A counter of one model."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    (line,) = (line for line in lines if line.startswith(f'{name}{{model="{model}"'))
    return float(line.split()[-1])
