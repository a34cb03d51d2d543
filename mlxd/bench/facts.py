"""What was measured on, and with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from mlxd import __version__
from mlxd.bench import figures
from mlxd.bench.scenarios import MIXED, Amount
from mlxd.bench.servers import engine_environment


class MeasureFailed(Exception):
    """The machine's rates could not be measured; the message says why."""


class Machine(msgspec.Struct, frozen=True):
    """This machine and the software on it."""

    cpu: str
    cores: int  # that this process may use
    system: str
    versions: dict[str, str]


class Ceiling(msgspec.Struct, frozen=True):
    """What this machine could do in `mixed` if serving cost nothing. Rates are tokens/s."""

    prompt_tokens: float
    max_tokens: int
    prefill_rate: float
    decode_rate: float
    tokens_per_second: float


class _Rates(msgspec.Struct, frozen=True):
    prompt_tokens: float
    prefill_rate: float
    decode_rate: float


def machine() -> Machine:
    """Facts of the machine that the bench runs on."""
    return Machine(
        cpu=_cpu(),
        cores=_cores(),
        system=f"{platform.system()} {platform.machine()}",
        versions={
            "mlxd": __version__,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "python": platform.python_version(),
        },
    )


def _cores() -> int:
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    if platform.system() == "Darwin":
        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def measure_ceiling(folder: Path, seed: int) -> Ceiling:
    """Measure prefill and decode alone, in a process of their own, with the `mixed` prompts.

    Raises:
        MeasureFailed: the model cannot run in the batch lane, or the process failed.
    """
    firsts = [script[0] for script in MIXED.scripts(Amount(requests=1, seed=seed))]
    work = {"prompts": [first.prompt for first in firsts], "max_tokens": MIXED.max_tokens}
    done = subprocess.run(
        [sys.executable, "-m", "mlxd.engine.measure", str(folder)],
        input=msgspec.json.encode(work),
        capture_output=True,
        check=False,
        env=engine_environment(),
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").splitlines()[-5:]
        raise MeasureFailed("\n".join(said))
    rates = msgspec.json.decode(done.stdout.splitlines()[-1], type=_Rates)
    known = msgspec.structs.asdict(rates) | {"max_tokens": MIXED.max_tokens}
    return Ceiling(tokens_per_second=figures.ceiling(**known), **known)
