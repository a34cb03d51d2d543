"""Fixtures of the HTTP tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from mlxd.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(starter_path: Path) -> Iterator[Tokenizer]:
    """The starter's."""
    loaded = asyncio.run(Tokenizer.load(starter_path, trust_remote_code=False))
    yield loaded
    loaded.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain client."""
    async with aiohttp.ClientSession() as session:
        yield session
