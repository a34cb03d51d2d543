"""What tests of several units share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxd.config import ServerSettings, cache_dir
from mlxd.models import fetch, parse


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's folder: real weights, fetched once into the user's cache.

    `_MLXD_TEST_CACHE` names another cache folder.
    """
    cache = os.environ.get("_MLXD_TEST_CACHE")
    folder = Path(cache) if cache else cache_dir(ServerSettings())
    return fetch(parse("starter:smollm2-135m-instruct"), folder, print)
