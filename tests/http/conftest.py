"""Fixtures of the HTTP tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from mlxd.text.tokenizer import Tokenizer
from tests.text.marked import marked_model


@pytest.fixture(scope="session")
def tokenizer(starter_path: Path) -> Iterator[Tokenizer]:
    """The starter's."""
    loaded = asyncio.run(Tokenizer.load(starter_path, trust_remote_code=False))
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def marked(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Of a model that marks its reasoning and its tool calls."""
    model = marked_model(starter_path, tmp_path_factory.mktemp("marked"), thinking=True)
    loaded = asyncio.run(Tokenizer.load(model, trust_remote_code=False))
    yield loaded
    loaded.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain client."""
    async with aiohttp.ClientSession() as session:
        yield session
