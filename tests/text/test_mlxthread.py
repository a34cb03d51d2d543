"""The one thread that touches MLX: order, errors, and that it outlives its callers."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from mlxd.text.mlxthread import MlxThread


def test_calls_run_one_at_a_time_in_their_order_in_one_thread() -> None:
    """Whoever gave them."""
    thread = MlxThread()
    ran: list[tuple[int, int]] = []

    def note(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for future in [thread.submit(partial(note, number)) for number in range(5)]:
        future.result()
    assert [number for number, _ in ran] == [0, 1, 2, 3, 4]
    assert len({ident for _, ident in ran}) == 1


def test_an_error_reaches_its_caller_and_the_thread_goes_on() -> None:
    """One bad folder does not end loading for the others."""
    thread = MlxThread()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()
    assert thread.submit(lambda: 5).result() == 5


def test_a_call_cancelled_while_it_waits_is_skipped() -> None:
    """A model that is unloaded before its turn is not loaded."""
    thread = MlxThread()
    gate = threading.Event()
    first = thread.submit(gate.wait)
    second = thread.submit(lambda: pytest.fail("it was run"))
    assert second.cancel()
    gate.set()
    assert first.result()
    assert thread.submit(lambda: 5).result() == 5


def test_a_process_that_loaded_a_tokenizer_exits_with_success(starter_path: Path) -> None:
    """MLX's thread-local objects do not abort it, nor is a tokenizer left open a reason."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from mlxd.text.tokenizer import Tokenizer\n"
        "async def main():\n"
        "    path = pathlib.Path(sys.argv[1])\n"
        "    tokenizer = await Tokenizer.load(path, trust_remote_code=False)\n"
        "    await tokenizer.encode('hi')\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(starter_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
