"""`mlxd bench`: which servers go through which scenarios, in which order."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from mlxd.bench import facts, report, servers, startup
from mlxd.bench.catalogue import SCENARIOS, STARTUP, Scenario
from mlxd.bench.figures import Figures, Metric
from mlxd.bench.load import Client, RequestFailed
from mlxd.bench.report import Report, Result
from mlxd.bench.scenarios import Amount
from mlxd.bench.servers import LAUNCHERS, ServerFailed
from mlxd.config import ServerSettings, cache_dir
from mlxd.wire import Blas

STARTER = "starter:smollm2-135m-instruct"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class NoModel(Exception):
    """The model could not be had; what it was said so already."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, parsed."""

    scenarios: Sequence[str]
    servers: Sequence[str]
    model: str
    runs: int
    requests: int
    seed: int
    output: str  # "table" | "markdown" | "json"


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; wrong usage and `--help` end the process, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="mlxd bench",
        description="Drive mlxd and mlx_lm.server side by side, on the same model and BLAS.",
    )
    names = [*SCENARIOS, STARTUP]
    parser.add_argument(
        "--scenario", action="append", choices=names, help="may be repeated; all without"
    )
    parser.add_argument(
        "--server", action="append", choices=[*LAUNCHERS], help="may be repeated; both without"
    )
    parser.add_argument("--model", default=STARTER, help="a source, as in the configuration")
    parser.add_argument("--runs", type=_at_least(1), default=3, help="on each server")
    parser.add_argument(
        "--requests", type=_at_least(2), default=5, help="of each client; the first not counted"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts and settings")
    output = parser.add_mutually_exclusive_group()
    for name in ("markdown", "json"):
        output.add_argument(f"--{name}", dest="output", action="store_const", const=name)
    chosen = parser.parse_args(arguments)
    return Options(
        scenarios=[name for name in names if name in (chosen.scenario or names)],
        servers=[name for name in LAUNCHERS if name in (chosen.server or LAUNCHERS)],
        model=chosen.model,
        runs=chosen.runs,
        requests=chosen.requests,
        seed=chosen.seed,
        output=chosen.output or "table",
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}")
        return value

    return number


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Progress goes to standard error.

    Returns:
        The exit status: 1 when a server or a request failed, so that nothing can be quoted.
    """
    options = parse(arguments)
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as scratch:
        try:
            bench = Bench(options, _fetch(options.model), Path(scratch), progress)
            found = asyncio.run(bench.run())
        except (asyncio.CancelledError, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        except (ServerFailed, RequestFailed, NoModel, facts.MeasureFailed) as error:
            progress.print(f"bench failed: {error}", markup=False, highlight=False, soft_wrap=True)
            return EXIT_FAILED
    match options.output:
        case "json":
            sys.stdout.write(report.to_json(found))
        case "markdown":
            sys.stdout.write(report.markdown(found))
        case _:
            report.show(found, Console())
    return 0


class Bench:
    """One call of the bench."""

    def __init__(self, options: Options, folder: Path, scratch: Path, progress: Console) -> None:
        self._options = options
        self._amount = Amount(options.requests, options.seed)
        self._folder = folder
        self._scratch = scratch
        self._progress = progress
        self._blas: dict[str, Blas] = {}

    async def run(self) -> Report:
        """Everything that was asked for.

        Raises:
            ServerFailed, RequestFailed, MeasureFailed: nothing can be quoted.
            CancelledError: SIGTERM; every server has been stopped.
        """
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        options = self._options
        ceiling = None
        if "mixed" in options.scenarios:
            self._tell("this machine's ceiling")
            ceiling = await asyncio.to_thread(facts.measure_ceiling, self._folder, options.seed)
        results: list[Result] = []
        for name in options.scenarios:
            if name == STARTUP:
                results.append(await self._starts())
            else:
                results += await self._compare(name, SCENARIOS[name])
        return Report(
            machine=facts.machine(),
            model=options.model,
            seed=options.seed,
            requests=options.requests,
            blas=self._blas,
            ceiling=ceiling,
            results=results,
        )

    async def _compare(self, name: str, scenario: Scenario) -> list[Result]:
        """Runs on all servers in turn, so that what the machine does meanwhile hits all alike."""
        options = self._options
        runs: dict[str, list[dict[Metric, float]]] = {
            server: []
            for server in options.servers
            if not scenario.servers or server in scenario.servers
        }
        for number in range(1, options.runs + 1):
            for server, done in runs.items():
                self._tell(f"{name}, run {number} of {options.runs}, {server}")
                done.append(dict(await self._once(server, scenario)))
        return [Result(name, scenario.about, server, done) for server, done in runs.items()]

    async def _once(self, server_name: str, scenario: Scenario) -> Figures:
        """One run on a server of its own: no cache and no heat of an earlier one."""
        launch = LAUNCHERS[server_name](self._folder, self._scratch, scenario.needs)
        # A connection for each request, on both: mlx_lm.server does not keep them.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            servers.ready(launch, self._scratch, session) as server,
        ):
            client = Client(session, launch.url, launch.model, time.monotonic)
            try:
                done = await scenario.run(client, self._amount)
            except RequestFailed as error:
                said = servers.last_words(launch, self._scratch)
                raise RequestFailed(f"{server_name}: {error}\n{said}") from error
            mapped = await servers.mapped_blas(server, session)
            if mapped is not None:
                self._blas[server_name] = mapped
        return done

    async def _starts(self) -> Result:
        starts = []
        for number in range(1, startup.STARTS + 1):
            self._tell(f"{STARTUP}, {number} of {startup.STARTS}, mlxd")
            starts.append(dict(await startup.run(self._folder, self._scratch)))
        about = f"{startup.STARTS} cold starts of the daemon"
        return Result(STARTUP, about, "mlxd", starts)

    def _tell(self, what: str) -> None:
        self._progress.print(what, markup=False, highlight=False, soft_wrap=True)


def _fetch(source: str) -> Path:
    """The model's folder, fetched if need be.

    Raises:
        NoModel: it could not be had.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mlxd.models", source, "--cache", str(cache_dir(ServerSettings()))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode != 0:
        raise NoModel(f"{source} could not be fetched")
    return Path(done.stdout.splitlines()[-1])
