"""The process behind a model: what it inherits, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mlxd import wire
from mlxd.host.lastwords import KEPT_LINES, MAX_LINE_BYTES
from mlxd.host.link import PATIENCE, BrokenFrame, EngineLink, engine_environment
from mlxd.wire import BatchTuning, Hello, LoadFailed, Phase, Ready, Start
from tests.daemon.fakes import is_running
from tests.daemon.light import ENGINE_COMMAND

START = Start("/models/x", "auto", None, trust_remote_code=False, batch=BatchTuning(2, 16, 16))


@asynccontextmanager
async def opened(
    command: Sequence[str] = ENGINE_COMMAND, *, patience: float = PATIENCE, **env: str
) -> AsyncIterator[EngineLink]:
    """A link to an engine that does not outlive the test."""
    link = await EngineLink.open("tiny", command, {**os.environ, **env}, patience)
    try:
        yield link
    finally:
        link.terminate()
        await link.ended()


def python(code: str) -> tuple[str, ...]:
    """An engine of one line."""
    return (sys.executable, "-c", code)


async def test_frames_arrive_in_order():
    """Hello comes first; the model is loaded on `Start`."""
    async with opened() as link:
        link.send(START)
        frames = link.frames()
        kinds = [type(await anext(frames)) for _ in range(4)]

    assert kinds == [Hello, Phase, Phase, Ready]


async def test_killed_engine_ends_the_frames_at_once():
    """End-of-file is the news; the exit status tells how."""
    async with opened() as link:
        frames = link.frames()
        await anext(frames)
        os.kill(link.pid, signal.SIGKILL)

        assert [frame async for frame in frames] == []
        assert await link.ended() == -signal.SIGKILL


async def test_last_words_are_kept():
    """What an engine printed before it died can be told."""
    async with opened(FAKE_LOAD="die") as link:
        link.send(START)
        async for _ in link.frames():
            pass
        await link.ended()

        assert link.last_words == ("Segmentation fault in the weights",)


async def test_endless_output_stays_bounded():
    """Only the last lines are kept, each cut; a line without an end is no trouble."""
    code = "print('x' * 1_000_000); [print(i) for i in range(1000)]"
    async with opened(python(code)) as link:
        await link.ended()

        assert len(link.last_words) == KEPT_LINES
        assert link.last_words[-1] == "999"
    async with opened(python("print('x' * 1_000_000)")) as link:
        await link.ended()

        assert len(link.last_words[0]) == MAX_LINE_BYTES


async def test_load_failure_is_a_frame():
    """A model that cannot be served is told in words, not by an exit status."""
    async with opened(FAKE_LOAD="fail") as link:
        link.send(START)

        assert LoadFailed("there are no weights in it") in [frame async for frame in link.frames()]


async def test_stop_is_clean():
    """An engine that is asked to stop ends by itself with status 0."""
    async with opened() as link:
        link.send(START)

        assert await link.stop() == 0


async def test_stubborn_engine_is_killed():
    """One that ignores the frame, the end-of-file and SIGTERM is ended by force."""
    async with opened(patience=0.05, FAKE_STUBBORN="1") as link:
        link.send(START)
        frames = link.frames()
        for _ in range(4):
            await anext(frames)

        assert await link.stop() == -signal.SIGKILL


async def test_an_engine_that_was_reaped_gets_no_signal():
    """Its id may be another process's by now; here, that of the group of one that lives on."""
    code = (
        "import subprocess as s; "
        "print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    async with opened(python(code)) as link:
        await link.ended()
        stranger = int(link.last_words[0])
        try:
            link.terminate()
            link.abort()
            await asyncio.sleep(0.1)

            assert is_running(stranger)
        finally:
            os.kill(stranger, signal.SIGKILL)


@pytest.mark.parametrize("turns", range(8))
async def test_an_engine_whose_start_is_cancelled_is_gone(tmp_path: Path, turns: int):
    """At whatever point of its start: nobody else would end it."""
    told = tmp_path / "told"
    code = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    opening = asyncio.create_task(EngineLink.open("tiny", python(code), os.environ))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    try:
        link = await opening
    except asyncio.CancelledError:
        await asyncio.sleep(0.3)  # time to tell its id, if it lives
        assert not told.exists() or not is_running(int(told.read_text()))
    else:
        link.terminate()
        await link.ended()


async def test_sending_to_a_dead_engine_is_no_error():
    """The end of the frames tells it, once; every sender need not know."""
    async with opened() as link:
        os.kill(link.pid, signal.SIGKILL)
        await link.ended()
        link.send(START)
        assert [frame async for frame in link.frames()] == []


@pytest.mark.parametrize(
    "bytes_", [b"\xff\xff\xff\xff", wire.pack(START)], ids=["too long", "not for the daemon"]
)
async def test_nonsense_is_not_believed(bytes_: bytes):
    """A frame that cannot be ends the trust in the stream."""
    code = f"import sys, os; os.write(int(sys.argv[-1]), {bytes_!r}); sys.stdin.read()"
    async with opened(python(code)) as link:
        with pytest.raises(BrokenFrame):
            await anext(link.frames())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
async def test_engine_inherits_no_other_file_of_the_daemon(tmp_path: Path):
    """The socket is all that an engine gets; no listener or log file leaks into it."""
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)  # noqa: FBT003
        code = "import os, subprocess; subprocess.run(['ls', '-l', f'/proc/{os.getpid()}/fd'])"
        async with opened(python(code)) as link:
            await link.ended()

            said = "\n".join(link.last_words)
            assert "socket:" in said
            assert "secret" not in said


def test_environment_is_the_daemons_without_its_settings():
    """MLXD_* stays behind; BLAS and TMPDIR are added; the model's table has the last word."""
    daemon = {"PATH": "/bin", "MLXD_SERVER__LISTEN": "x", "TMPDIR": "/tmp", "A": "daemon"}

    environment = engine_environment(
        daemon,
        scratch=Path("/cache/engines/tiny"),
        blas={"LD_PRELOAD": "/lib/openblas.so"},
        model={"A": "model"},
    )

    assert environment == {
        "PATH": "/bin",
        "TMPDIR": "/cache/engines/tiny",
        "LD_PRELOAD": "/lib/openblas.so",
        "A": "model",
    }
