"""A real engine is killed in mid-stream, under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp

CLIENTS = 24  # more than there are rows: some stream, some wait
TOKENS = 60
BODY = {"model": "default", "temperature": 0, "max_tokens": TOKENS, "stream": True}


async def test_killed_engine_loses_no_request(base: str) -> None:
    """Each stream ends once, in an error if it had begun; the others are answered in full by the
    next engine, with the same text as before.
    """
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(base, timeout=timeout) as session:
        expected, natural = await streamed(session, began=asyncio.Event())
        pid = await engine(session)
        began = asyncio.Event()
        streams = [asyncio.create_task(streamed(session, began)) for _ in range(CLIENTS)]
        await began.wait()
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*streams)

        ends = [end for _text, end in answers]
        assert set(ends) == {natural, "engine_failed"}
        assert all(expected.startswith(text) for text, _end in answers)
        assert all(text == expected for text, end in answers if end == natural)
        assert await engine(session) != pid
        async with session.get("/readyz", params={"model": "default"}) as ready:
            assert ready.status == 200
        assert await counted(session, "mlxd_engine_restarts_total") == 1


async def streamed(session: aiohttp.ClientSession, began: asyncio.Event) -> tuple[str, str]:
    """The text of one stream and its one end: a finish reason, or an error's code."""
    text, ends = "", []
    body = {**BODY, "messages": [{"role": "user", "content": "Count from one to fifty."}]}
    async with session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                ends.append(event["error"]["code"])
                continue
            (choice,) = event["choices"]
            if content := choice["delta"].get("content"):
                text += content
                began.set()
            if choice["finish_reason"] is not None:
                ends.append(choice["finish_reason"])
    (end,) = ends
    return text, end


async def engine(session: aiohttp.ClientSession) -> int:
    """The process id of the model's engine."""
    async with session.get("/admin/status") as answer:
        (model,) = (await answer.json())["models"]
    return int(model["engine"]["pid"])


async def counted(session: aiohttp.ClientSession, name: str) -> float:
    """A counter of the one model."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}{{"))
    return float(line.split()[-1])
