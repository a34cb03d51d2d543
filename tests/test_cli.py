"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from mlxd import __version__
from mlxd.cli.client import parse_url
from mlxd.cli.commands import app
from mlxd.cli.common import EXIT_REFUSED, EXIT_UNREACHABLE
from mlxd.config import TcpAddress, UnixAddress
from mlxd.operations import (
    DaemonStatus,
    DrainReport,
    EngineStatus,
    LaneCounts,
    LiveRequests,
    ModelStatus,
    PhaseStatus,
    RequestStatus,
)
from mlxd.plan import Plan
from mlxd.wire import Blas

STATUS = DaemonStatus(
    state="ready",
    version="9.9",
    config_etag="abc",
    reloading=False,
    models=[
        ModelStatus(
            id="tiny",
            aliases=["default"],
            source="o/t",
            state="failed",
            reason="out of [memory]",
            width=16,
            running=LaneCounts(batch=3),
            waiting=LaneCounts(batch=2, serial=1),
            phase=PhaseStatus("idle", 1.0, budget=None),
            engine=EngineStatus(1, "cpu", "1", "2", Blas("openblas", "/x")),
            capabilities=None,
            kv_bytes=2**20,
            kv_budget_bytes=2**21,
            prefix_cache_bytes=0,
            peak_bytes=2**23,
            weight_bytes=5 * 2**20,
            working_bytes=2**20,
            restarts=7,
        )
    ],
)


REQUEST = RequestStatus("r-1", "tiny", "alice", "serial", "seed", "waiting", 1.5, 3, 0)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """The command line in this process; nobody's own MLXD_CONFIG counts."""
    return CliRunner().invoke(app, arguments, env={"MLXD_CONFIG": None, **(env or {})})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file of one model."""
    file = tmp_path / "mlxd.toml"
    file.write_text('[models.tiny]\nsource = "./tiny"\n')
    return file


class FakeDaemon:
    """Answers every call with what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.token: str | None = None  # of the last call
        self.status = 200
        self.content = b"{}"

    def answers(self, body: object, status: int = 200) -> None:
        """Say this from now on."""
        self.status, self.content = status, msgspec.json.encode(body)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The server's half that speaks HTTP."""
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                daemon.token = self.headers.get("Authorization")
                daemon.calls.append((self.command, self.path, body))
                self.send_response(daemon.status)
                self.send_header("Content-Length", str(len(daemon.content)))
                self.end_headers()
                self.wfile.write(daemon.content)

            do_DELETE = do_GET  # noqa: N815
            do_POST = do_GET  # noqa: N815 - http.server finds it by this name

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's
                """Tests print nothing."""

        return Handler


@pytest.fixture
def daemon() -> FakeDaemon:
    """What the admin API would answer."""
    return FakeDaemon()


@pytest.fixture
def url(daemon: FakeDaemon) -> Iterator[str]:
    """Where the fake daemon listens."""
    with HTTPServer(("127.0.0.1", 0), daemon.handler()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class TestCheck:
    """`mlxd check`."""

    def test_a_good_file_is_said_to_be_good(self, config: Path) -> None:
        """With the models that it would serve."""
        result = run("check", "--config", str(config))

        assert (result.exit_code, result.stdout) == (0, f"{config}: good; 1 models: tiny\n")

    def test_every_problem_is_printed(self, config: Path) -> None:
        """One to a line, on standard error."""
        config.write_text('[server]\nlisten = "x"\n[models.a]\n')

        result = run("check", "-c", str(config))

        assert result.exit_code == EXIT_REFUSED
        assert result.stdout == ""
        assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
            "server.listen",
            "models.a.source",
        ]

    def test_the_file_can_come_from_the_environment(self, config: Path) -> None:
        """MLXD_CONFIG stands in for --config."""
        assert run("check", env={"MLXD_CONFIG": str(config)}).exit_code == 0

    def test_the_file_can_be_named_before_the_command(self, config: Path) -> None:
        """As in `mlxd --config x check`."""
        assert run("--config", str(config), "check").exit_code == 0

    def test_no_file_is_wrong_usage(self) -> None:
        """There is no hidden default to serve something unexpected from."""
        result = run("check")

        assert result.exit_code == 2
        assert "--config" in result.stderr


class TestServe:
    """`mlxd` and `mlxd serve`."""

    @pytest.mark.parametrize("command", [["serve"], []])
    def test_a_wrong_file_ends_it_with_the_problems(self, config: Path, command: list[str]) -> None:
        """Before anything is bound or loaded, and without a traceback."""
        config.write_text("nonsense = 1\n")

        result = run(*command, "--config", str(config))

        assert result.exit_code == EXIT_REFUSED
        assert f"{config}:1: nonsense: unknown key" in result.stderr
        assert "Traceback" not in result.stderr

    def test_the_version_is_printed(self) -> None:
        """Without a file."""
        assert run("--version").stdout == f"mlxd {__version__}\n"

    def test_starting_imports_nothing_heavy(self) -> None:
        """What loads models, speaks to hubs or draws tables must not delay the listener."""
        heavy = ["mlx", "mlx_lm", "transformers", "huggingface_hub", "gguf2mlx", "numpy", "rich"]
        script = f"import sys, mlxd.cli; print([m for m in {heavy} if m in sys.modules])"

        printed = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout

        assert printed == "[]\n"


class TestFetch:
    """`mlxd fetch`."""

    def make_model(self, config: Path) -> Path:
        """The folder that the file names."""
        folder = config.parent / "tiny"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").touch()
        return folder

    def test_each_models_folder_is_printed(self, config: Path) -> None:
        """Also of those that need no fetching."""
        folder = self.make_model(config)

        result = run("fetch", "--config", str(config))

        assert (result.exit_code, result.stdout) == (0, f"tiny: {folder}\n")

    def test_a_model_that_cannot_be_had_fails(self, config: Path) -> None:
        """The child process has said why by then."""
        result = run("fetch", "tiny", "--config", str(config))

        assert result.exit_code == EXIT_REFUSED
        assert "tiny could not be fetched" in result.stderr

    def test_only_models_of_the_file_are_fetched(self, config: Path) -> None:
        """A name that is not in the file is never looked for elsewhere."""
        result = run("fetch", "o/other", "--config", str(config))

        assert result.exit_code == EXIT_REFUSED
        assert result.stderr == "no such model in the file: o/other\n"


class TestClients:
    """`mlxd status`, `drain`, `resume` and `reload`."""

    def test_status_shows_each_model(self, daemon: FakeDaemon, url: str) -> None:
        """A table for people, with the reason of what has failed."""
        daemon.answers(STATUS)

        result = run("status", "--url", url, env={"COLUMNS": "200"})

        assert result.exit_code == 0
        assert "mlxd 9.9: ready, config abc" in result.stdout
        for cell in (
            "tiny, default",
            "failed, idle",
            "3 of 16",
            "2 + 1 serial",
            "5 MiB + 1 MiB KV",
            "openblas",
        ):
            assert cell in result.stdout
        assert "tiny: out of [memory]" in result.stdout
        assert daemon.calls == [("GET", "/admin/status", None)]

    def test_the_files_token_goes_along(self, config: Path, daemon: FakeDaemon, url: str) -> None:
        """Where the file names one, it opens /admin; without a file, its variable does."""
        token = config.parent / "token"
        token.write_text("operator\n")
        daemon.answers(STATUS)

        run("status", "--url", url)
        tokens = [daemon.token]
        run("status", "--url", url, env={"MLXD_ADMIN__TOKEN_FILE": str(token)})
        tokens.append(daemon.token)
        config.write_text(f'{config.read_text()}[admin]\ntoken_file = "token"\n')
        run("status", "--url", url, "--config", str(config))
        tokens.append(daemon.token)

        assert tokens == [None, "Bearer operator", "Bearer operator"]

    def test_a_token_that_cannot_be_read_is_told(self, url: str) -> None:
        """By the variable's name, before anything is asked."""
        result = run("status", "--url", url, env={"MLXD_ADMIN__TOKEN_FILE": "/nowhere"})

        assert result.exit_code == EXIT_REFUSED
        assert "MLXD_ADMIN__TOKEN_FILE: /nowhere: cannot be read" in result.stderr

    def test_the_admins_own_listener_is_asked(self, config: Path) -> None:
        """Where the file gives it one."""
        config.write_text(f'{config.read_text()}[admin]\nlisten = "unix:admin.sock"\n')

        result = run("status", "--config", str(config))

        assert result.exit_code == EXIT_UNREACHABLE
        assert f"unix:{config.parent}/admin.sock" in result.stderr

    def test_json_is_the_answer_as_it_is(self, daemon: FakeDaemon, url: str) -> None:
        """Scripts read what the API says."""
        daemon.answers({"new": 1})

        assert json.loads(run("status", "--url", url, "--json").stdout) == {"new": 1}

    def test_another_versions_answer_is_shown_as_it_is(self, daemon: FakeDaemon, url: str) -> None:
        """A table that does not fit is no reason to show nothing."""
        daemon.answers({"state": "odd"})

        result = run("status", "--url", url)

        assert result.exit_code == 0
        assert json.loads(result.stdout) == {"state": "odd"}

    def test_drain_waits_for_what_runs(self, daemon: FakeDaemon, url: str) -> None:
        """The timeout goes to the daemon as it was written."""
        daemon.answers(DrainReport("drained"))

        result = run("drain", "tiny", "--timeout", "5m", "--url", url)

        assert (result.exit_code, result.stdout) == (0, "drained\n")
        body = {"model": "tiny", "timeout": "5m", "wait": True}
        assert daemon.calls == [("POST", "/admin/drain", body)]

    def test_a_drain_that_meets_its_timeout_says_what_still_runs(
        self, daemon: FakeDaemon, url: str
    ) -> None:
        """With a status that a script can act on."""
        report = DrainReport("draining", {"tiny": LiveRequests(2, 1), "idle": LiveRequests(0, 0)})
        daemon.answers(report, status=504)

        result = run("drain", "--url", url)

        assert result.exit_code == EXIT_REFUSED
        assert result.stdout == "draining\ntiny: 2 running, 1 waiting\n"

    def test_a_drain_need_not_wait(self, daemon: FakeDaemon, url: str) -> None:
        """The daemon answers at once, and that is no failure."""
        daemon.answers(DrainReport("draining"), status=202)

        assert run("drain", "--no-wait", "--url", url).exit_code == 0
        assert daemon.calls[0][2]["wait"] is False

    def test_resume_shows_the_state_after_it(self, daemon: FakeDaemon, url: str) -> None:
        """All models, unless one is named."""
        daemon.answers(STATUS)

        result = run("resume", "--url", url)

        assert "mlxd 9.9: ready" in result.stdout
        assert daemon.calls == [("POST", "/admin/resume", {"model": None})]

    @pytest.mark.parametrize("command", ["load", "unload", "restart"])
    def test_a_models_engine_comes_and_goes(
        self, daemon: FakeDaemon, url: str, command: str
    ) -> None:
        """Its state afterwards is printed, with the reason where it failed."""
        daemon.answers(STATUS.models[0])

        result = run(command, "tiny", "--url", url)

        assert result.stdout == "tiny: failed: out of [memory]\n"
        assert daemon.calls == [("POST", f"/admin/models/tiny/{command}", None)]

    def test_requests_are_listed(self, daemon: FakeDaemon, url: str) -> None:
        """Who runs, who waits, for how long."""
        daemon.answers({"requests": [REQUEST]})

        result = run("requests", "--url", url, env={"COLUMNS": "200"})

        for cell in ("r-1", "tiny", "alice", "serial, seed", "waiting", "1.5"):
            assert cell in result.stdout
        daemon.answers({"requests": []})
        assert run("requests", "--url", url).stdout == "no requests\n"

    def test_one_request_is_ended(self, daemon: FakeDaemon, url: str) -> None:
        """By its id."""
        daemon.answers({"cancelled": 1})

        assert run("cancel", "r-1", "--url", url).stdout == "1 ended\n"
        assert daemon.calls == [("DELETE", "/admin/requests/r-1", None)]

    def test_top_shows_models_and_requests(self, daemon: FakeDaemon, url: str) -> None:
        """As often as it is told to."""
        daemon.answers({**msgspec.to_builtins(STATUS), "requests": [REQUEST]})

        result = run("top", "--count", "2", "--interval", "0.1", "--url", url)

        assert result.exit_code == 0
        assert [call[1] for call in daemon.calls] == ["/admin/status", "/admin/requests"] * 2

    def test_reload_prints_the_plan(self, daemon: FakeDaemon, url: str) -> None:
        """What changes, and which keys are the cause."""
        plan = Plan(
            keep=["k"], add=["a"], remove=["r"], retune={"t": ["batch.width", "policy.seed"]}
        )
        daemon.answers({"dry_run": True, "plan": plan})

        result = run("reload", "--dry-run", "--url", url)

        assert result.stdout == "add a\nremove r\nretune t: batch.width, policy.seed\n"
        assert daemon.calls == [("POST", "/admin/reload", {"dry_run": True})]

    def test_a_reload_without_changes_says_so(self, daemon: FakeDaemon, url: str) -> None:
        """Silence would look like a failure."""
        daemon.answers({"dry_run": False, "plan": Plan(keep=["k"])})

        assert run("reload", "--url", url).stdout == "nothing changes\n"

    def test_a_refusal_is_told_in_the_daemons_words(self, daemon: FakeDaemon, url: str) -> None:
        """On standard error; with --json the whole answer, on standard output."""
        refusal = {"error": {"message": "mlxd.toml:1: x: unknown key"}, "problems": ["…"]}
        daemon.answers(refusal, status=422)

        plain, as_json = run("reload", "--url", url), run("reload", "--url", url, "--json")

        assert (plain.exit_code, plain.stdout) == (EXIT_REFUSED, "")
        assert plain.stderr == "mlxd.toml:1: x: unknown key\n"
        assert as_json.exit_code == EXIT_REFUSED
        assert json.loads(as_json.stdout) == refusal

    def test_no_daemon_is_one_line(self) -> None:
        """A closed port has an exit status of its own."""
        with socket.socket() as taken:  # bound and not listening: nobody else can have it
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            result = run("status", "--url", f"http://127.0.0.1:{port}")

        assert result.exit_code == EXIT_UNREACHABLE
        assert result.stderr == f"no daemon answers at 127.0.0.1:{port}: Connection refused\n"

    def test_what_is_no_mlxd_is_told(self, daemon: FakeDaemon, url: str) -> None:
        """Another server's page is not shown."""
        daemon.content = b"<html>"

        result = run("status", "--url", url)

        assert result.exit_code == EXIT_UNREACHABLE
        assert "is no mlxd" in result.stderr

    def test_the_files_socket_is_used(self, daemon: FakeDaemon, config: Path) -> None:
        """A daemon on a unix socket is found through its configuration."""
        text = config.read_text()
        config.write_text(f'[server]\nlisten = "unix:s"\n{text}')
        daemon.answers(STATUS)
        handler = daemon.handler()

        with socketserver.UnixStreamServer(str(config.parent / "s"), handler) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            result = run("status", "--config", str(config))
            thread.join()

        assert "mlxd 9.9: ready" in result.stdout

    @pytest.mark.parametrize(
        ("url", "address"),
        [
            ("http://host:81", TcpAddress("host", 81)),
            ("http://host/", TcpAddress("host", 80)),
            ("http://[::1]:8080", TcpAddress("::1", 8080)),
            ("unix:/run/mlxd.sock", UnixAddress("/run/mlxd.sock")),
        ],
    )
    def test_urls_are_addresses(self, url: str, address: TcpAddress | UnixAddress) -> None:
        """Of a host or of a socket."""
        assert parse_url(url) == address

    @pytest.mark.parametrize("url", ["host:81", "https://host", "http://", "unix:x", "http://h/a"])
    def test_other_urls_are_wrong_usage(self, url: str) -> None:
        """Named as such, before anything is asked."""
        result = run("status", "--url", url)

        assert result.exit_code == 2
        assert "unix:/path" in result.stderr
