"""The real daemon process on fake engines: start, signals, reload, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.fakes import eventually, is_running
from tests.daemon.process import Daemon, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place with the plain configuration."""
    place = Place(tmp_path)
    place.write()
    return place


async def test_probes_answer_while_models_load(place: Place):
    """Bound first: alive at once, not ready before the model is, and never a 500."""
    place.write(env=f'FAKE_LOAD = "{place.gate}"')
    async with place.serving(ready=False) as daemon:
        assert await daemon.status("/livez") == 200
        assert await daemon.status("/readyz") == 503
        assert await daemon.status("/readyz?model=tiny") == 503
        assert (await daemon.complete()).status == 503
        place.gate.touch()
        await daemon.logged("model ready")
        assert await daemon.status("/readyz") == 200
        assert (await daemon.complete()).status == 200


async def test_failed_model_leaves_the_probes_alive(place: Place):
    """With no model that can serve: alive, not ready, and the reason in the status."""
    place.write(env='FAKE_LOAD = "fail"')
    async with place.serving(ready=False) as daemon:
        await daemon.logged("model failed")

        assert await daemon.status("/livez") == 200
        assert await daemon.status("/readyz") == 503
        assert await daemon.status("/metrics") == 200
        assert (await daemon.complete()).status == 503
        async with daemon.client.get(f"{daemon.base}/admin/status") as answer:
            (model,) = (await answer.json())["models"]
        assert (model["state"], model["reason"]) == ("failed", "there are no weights in it")


async def test_sigterm_finishes_what_was_accepted(place: Place):
    """In mid-stream with one waiting: both finish, new ones get 503, the listener stays, exit 0."""
    place.write(env=f'FAKE_GATE = "{place.gate}"', model="")
    async with place.serving() as daemon:
        streams = [await daemon.stream(20), await daemon.stream(20)]
        waiting = asyncio.create_task(daemon.complete(20))
        await eventually(lambda: waits(daemon))
        daemon.signal(signal.SIGTERM)
        await daemon.logged("draining")

        refused = await daemon.complete()
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert await daemon.status("/livez") == 200
        assert await daemon.status("/readyz") == 503

        place.gate.touch()
        texts = [await stream.text() for stream in streams]
        assert all("[DONE]" in text and '"finish_reason":"length"' in text for text in texts)
        assert (await waiting).status == 200
        assert await daemon.ended() == 0


async def test_sigterm_truncates_none_of_many_streams(place: Place):
    """Thirty-two streams, most of which wait for a row: each ends by itself, and the exit is 0."""
    place.write(env=f'FAKE_GATE = "{place.gate}"')
    async with place.serving() as daemon:

        async def text() -> str:
            return await (await daemon.stream(20)).text()

        streams = [asyncio.create_task(text()) for _ in range(32)]
        await eventually(lambda: waits(daemon, 30))
        daemon.signal(signal.SIGTERM)
        await daemon.logged("draining")
        place.gate.touch()

        for stream in asyncio.as_completed(streams):
            answer = await stream
            assert answer.count('"finish_reason":"length"') == 1
            assert answer.rstrip().endswith("[DONE]")
            assert "".join(re.findall(r'"text":"(\w+)"', answer)) == "abcdefghijklmnopqrst"
        assert await daemon.ended() == 0


async def waits(daemon: Daemon, count: int = 1) -> bool:
    """Whether so many requests wait for a row."""
    async with daemon.client.get(f"{daemon.base}/admin/status") as answer:
        (model,) = (await answer.json())["models"]
    return int(model["waiting"]["batch"]) >= count


async def test_deadline_cuts_with_partial_text(place: Place):
    """At `drain_timeout` a stream ends properly, with `length` and what there is."""
    place.write(env=f'FAKE_GATE = "{place.gate}"', drain_timeout="100ms")
    async with place.serving() as daemon:
        stream = await daemon.stream(20)
        daemon.signal(signal.SIGTERM)

        text = await stream.text()
        assert '"finish_reason":"length"' in text
        assert text.rstrip().endswith("[DONE]")
        assert await daemon.ended() == 0


async def test_second_signal_ends_at_once(place: Place):
    """Whatever still runs: the first signal asks, the second does not."""
    place.write(env=f'FAKE_GATE = "{place.gate}"')
    async with place.serving() as daemon:
        stream = await daemon.stream(20)
        engine = (await daemon.logged("engine started"))["pid"]
        daemon.signal(signal.SIGTERM)
        await daemon.logged("draining")
        daemon.signal(signal.SIGINT)

        assert await daemon.ended(within=2) == 128 + signal.SIGINT
        stream.close()
        await eventually(lambda: not is_running(engine))


async def test_reader_that_never_reads_cannot_hold_the_exit(place: Place):
    """A client with a full window is cut off after the deadline."""
    # A Unix socket's buffer is small and stays so; each of these tokens is six bytes of JSON.
    tokens = 90_000
    if buffered_by_the_system() > tokens * 6 // 2:
        pytest.skip("this system's sockets take what the daemon would have to hold")
    path = place.folder / "s"
    env = 'FAKE_BURST = "500"\nFAKE_TOKEN = "1"'
    place.write(listen=f"unix:{path}", env=env, drain_timeout="500ms")
    async with place.serving() as daemon:
        with socket.socket(socket.AF_UNIX) as stalled:
            stalled.connect(str(path))
            body = b'{"model":"tiny","prompt":"hi","max_tokens":%d,"stream":true}' % tokens
            stalled.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            await asyncio.to_thread(stalled.recv, 1)
            # A deadline that cuts the row before its answer fills the window proves nothing.
            await nothing_runs(path)
            daemon.signal(signal.SIGTERM)

            assert await daemon.ended(within=20) == 0
    assert "some clients have not read their answers to the end" in {
        line["event"] for line in daemon.log
    }


def buffered_by_the_system() -> int:
    """Bytes that a Unix socket takes while nobody reads."""
    ours, theirs = socket.socketpair()
    taken = 0
    with ours, theirs, contextlib.suppress(BlockingIOError):
        ours.settimeout(0)
        while True:
            taken += ours.send(bytes(4096))
    return taken


async def nothing_runs(path: Path) -> None:
    """Wait until the engine has given all that it was asked for, whoever has read it."""
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as operator:

        async def idle() -> bool:
            async with operator.get("/admin/status") as answer:
                (model,) = (await answer.json())["models"]
            return bool(model["running"]["batch"] == 0)

        await eventually(idle, within=30)


async def test_sigterm_while_loading_ends_promptly(place: Place):
    """There is nothing to finish yet."""
    place.write(env=f'FAKE_LOAD = "{place.gate}"')
    async with place.serving(ready=False) as daemon:
        await daemon.logged("engine started")
        daemon.signal(signal.SIGTERM)

        assert await daemon.ended(within=4) == 0


async def test_sighup_applies_a_good_file_and_refuses_a_bad_one(place: Place):
    """A bad file is a log line and nothing else; a good one changes what it says."""
    async with place.serving() as daemon:
        place.write(more="[models.two]\nsource = 1")
        daemon.signal(signal.SIGHUP)
        failure = await daemon.logged("reload failed; nothing has changed")
        assert "models.two.source" in failure["problems"][0]
        assert (await daemon.complete()).status == 200

        place.write(model='aliases = ["other"]')
        daemon.signal(signal.SIGHUP)
        reloaded = await daemon.logged("reloaded")
        assert reloaded["plan"]["retune"] == {"tiny": ["aliases"]}
        assert await daemon.status("/readyz?model=other") == 200

        place.write(listen="127.0.0.1:1", model='aliases = ["other"]')
        daemon.signal(signal.SIGHUP)
        failure = await daemon.logged("reload failed; nothing has changed", count=2)
        assert failure["problems"] == ["server.listen: changed; this needs a restart"]

        async with daemon.client.get(f"{daemon.base}/metrics") as answer:
            metrics = await answer.text()
        assert 'mlxd_reloads_total{result="success"} 1.0' in metrics
        assert 'mlxd_reloads_total{result="failure"} 2.0' in metrics


async def test_keys_change_by_reload(place: Place):
    """A key that is taken out of the file stops working at the next SIGHUP; nothing restarts."""
    (place.folder / "token").write_text("operator")
    keys = place.folder / "keys"
    keys.write_text("old:first-key\n")
    place.write(server='api_keys_file = "keys"', more='[admin]\ntoken_file = "token"')

    async with place.serving() as daemon:

        async def status(secret: str) -> int:
            headers = {"Authorization": f"Bearer {secret}"}
            url = f"{daemon.base}/v1/models"
            async with daemon.client.get(url, headers=headers) as answer:
                return answer.status

        assert (await status("first-key"), await status("second-key")) == (200, 401)
        keys.write_text("new:second-key\n")
        daemon.signal(signal.SIGHUP)
        assert (await daemon.logged("reloaded"))["plan"]["server"] == ["api_keys_file"]
        assert (await status("first-key"), await status("second-key")) == (401, 200)

        keys.write_text("new:\n")
        daemon.signal(signal.SIGHUP)
        failure = await daemon.logged("reload failed; nothing has changed")
        assert "the key is empty" in failure["problems"][0]
        assert await status("second-key") == 200
        daemon.signal(signal.SIGTERM)
        await daemon.ended()

    told = json.dumps(daemon.log)
    assert not any(secret in told for secret in ("first-key", "second-key", "operator"))


async def test_admin_has_a_listener_of_its_own(place: Place):
    """On a Unix socket it needs no token, and the public listener has no /admin at all."""
    path = place.folder / "a"
    (place.folder / "keys").write_text("one:a-key\n")
    place.write(server='api_keys_file = "keys"', more=f'[admin]\nlisten = "unix:{path}"')

    async with place.serving() as daemon:
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession("http://localhost", connector=connector) as operator:
            for route in ("/admin/status", "/metrics", "/readyz"):
                async with operator.get(route) as answer:
                    assert answer.status == 200, route
            async with operator.get("/v1/models") as answer:
                assert answer.status == 404
        headers = {"Authorization": "Bearer a-key"}
        async with daemon.client.get(f"{daemon.base}/admin/status", headers=headers) as answer:
            assert answer.status == 404
        assert await daemon.status("/admin/status") == 401
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 0


async def test_log_level_changes_by_reload(place: Place):
    """`[log]` is live."""
    async with place.serving() as daemon:
        quiet = place.config.read_text().replace(
            'format = "json"', 'format = "json"\nlevel="error"'
        )
        place.config.write_text(quiet)
        async with daemon.client.post(f"{daemon.base}/admin/reload") as answer:
            assert (await answer.json())["plan"]["log"] == ["level"]
        seen = len([line for line in daemon.log if line.get("event") == "request"])
        await daemon.complete()
        daemon.signal(signal.SIGTERM)
        await daemon.ended()

        assert len([line for line in daemon.log if line.get("event") == "request"]) == seen


async def test_taken_port_ends_before_anything_loads(place: Place):
    """A second daemon on the same port exits non-zero, says why, and starts no engine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place.write(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        async with place.daemon() as daemon:
            assert await daemon.ended() == 1

    assert [line["event"] for line in daemon.log] == ["cannot listen"]
    assert not (place.folder / "cache").exists()


async def test_unix_socket_is_served_and_cleaned_up(place: Place):
    """A Unix socket works like a port: one daemon at a time, and its file goes with it."""
    path = place.folder / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    place.write(listen=f"unix:{path}")
    async with place.serving() as daemon:
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get("http://localhost/readyz") as answer,
        ):
            assert answer.status == 200
        async with place.daemon() as second:
            assert await second.ended() == 1
        assert path.exists()
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 0

    assert not path.exists()


async def test_a_service_managers_bare_start_serves(place: Place):
    """Standard input closed, so that the first socket is number 0, no terminal, no home."""
    place.environment = {"HOME": "/proc"}  # where nothing can be made
    bare = (
        "import os, runpy; os.close(0);runpy.run_module('tests.daemon.launch', run_name='__main__')"
    )
    async with place.daemon("-c", bare) as daemon:
        daemon.base = f"http://{(await daemon.logged('listening'))['address']}"
        await daemon.logged("model ready")

        assert (await daemon.complete()).status == 200
        daemon.signal(signal.SIGTERM)
        assert await daemon.ended() == 0


async def test_a_home_that_takes_nothing_fails_with_the_reason(place: Place):
    """Where the cache would be under it; what needs no cache, such as the status, is served."""
    place.environment = {"HOME": "/proc", "XDG_CACHE_HOME": ""}
    place.config.write_text(place.config.read_text().replace("cache_dir", "# cache_dir"))
    async with place.serving(ready=False) as daemon:
        failure = await daemon.logged("model failed")

        assert "/proc" in failure["reason"]
        assert await daemon.status("/livez") == 200


async def test_secrets_that_everybody_can_read_are_told_of(place: Place):
    """At the start and at a reload; a container's secrets may be so, hence no refusal."""
    token = place.folder / "token"
    token.write_text("operator")
    token.chmod(0o644)
    place.write(more='[admin]\ntoken_file = "token"')
    async with place.serving() as daemon:
        told = await daemon.logged("every user of this machine can read these secrets")
        assert told["files"] == [str(token)]
        token.chmod(0o640)
        daemon.signal(signal.SIGHUP)
        await daemon.logged("reloaded")
        daemon.signal(signal.SIGTERM)
        await daemon.ended()

    assert sum("can read these secrets" in line.get("event", "") for line in daemon.log) == 1


async def test_bad_configuration_ends_with_every_problem(place: Place):
    """Nothing is bound and nothing is started on a file that cannot be."""
    place.write(more="[models.two]\nsource = 1\n[nonsense]")
    async with place.daemon() as daemon:
        assert await daemon.ended() == 1

    said = "".join(line["raw"] for line in daemon.log)
    assert "models.two.source" in said
    assert "nonsense" in said


async def test_nothing_heavy_is_imported_before_the_listener_is_bound(place: Place):
    """MLX, mlx-lm and transformers cost seconds; the probes must not wait for them."""
    script = place.folder / "probe.py"
    script.write_text(
        """
import json, sys
from pathlib import Path
sys.path.insert(0, ".")
from mlxd.daemon import Parts, run
from tests.daemon.fakes import eventually, is_running
from tests.daemon.light import ENGINE_COMMAND, load_byte_tokenizer

async def load(folder, trust):
    # The first thing after the listener; the real one imports here, in its worker.
    print(json.dumps({"event": "modules", "names": sorted(sys.modules)}), file=sys.stderr)
    return await load_byte_tokenizer(folder, trust)

sys.exit(run(Path(sys.argv[1]), Parts(ENGINE_COMMAND, load)))
"""
    )
    async with place.daemon(str(script)) as daemon:
        names = {name.partition(".")[0] for name in (await daemon.logged("modules"))["names"]}

    assert not names & {"mlx", "mlx_lm", "transformers", "numpy", "torch", "huggingface_hub"}
