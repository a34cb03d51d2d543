"""Sources as folders: looked for off the event loop, fetched by a child process."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from mlxd.host.fetcher import Fetcher, FetchFailed
from mlxd.models import Source

SAYS = "import sys; print('10 %', file=sys.stderr); print(sys.argv[1:])"
FAILS = "import sys; print('no such repository', file=sys.stderr); sys.exit(1)"


def nowhere(_source: Source, _cache: Path) -> Path | None:
    """Nothing is on this machine."""
    return None


async def test_looking_for_a_model_holds_nobody_up(tmp_path: Path) -> None:
    """The event loop goes on while a cache is walked: here it is what lets the walk end."""
    looked = threading.Event()

    def find(_source: Source, cache: Path) -> Path | None:
        return cache if looked.wait(10) else None

    locating = asyncio.create_task(Fetcher(tmp_path, find=find).locate("owner/name"))
    asyncio.get_running_loop().call_later(0, looked.set)

    assert await locating == tmp_path


async def test_what_is_not_there_is_fetched_by_a_child(tmp_path: Path) -> None:
    """It is told the source and the cache; its last line is the folder."""
    fetcher = Fetcher(tmp_path, (sys.executable, "-c", SAYS), nowhere)

    assert await fetcher.locate("owner/name") == Path(str(["owner/name", "--cache", str(tmp_path)]))


async def test_a_failed_fetch_gives_the_childs_last_words(tmp_path: Path) -> None:
    """The reason that people see is the child's."""
    fetcher = Fetcher(tmp_path, (sys.executable, "-c", FAILS), nowhere)

    with pytest.raises(FetchFailed, match="cannot fetch owner/name: no such repository"):
        await fetcher.locate("owner/name")
