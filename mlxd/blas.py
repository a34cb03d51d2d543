"""The BLAS of engine processes on Linux: finding a fast one, and telling which one is in use.

The MLX wheel for Linux CPUs links the reference BLAS, which is 30 times slower. A library that is
preloaded takes its place symbol by symbol. Nothing is loaded here: a daemon that opened OpenBLAS
would keep its threads. macOS has Accelerate and needs none of this.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxd.wire import Blas

Kind = Literal["auto", "openblas", "mkl", "none"]

#: Said when there is none.
ADVICE = (
    "no OpenBLAS found: this machine's CPU will be about 30 times slower than it can be; install "
    "libopenblas0-pthread (Debian, Ubuntu), openblas-threads (Fedora) or openblas (Arch), or "
    "run `pip install 'mlxd[mkl]'` (x86-64, about 1 GB)"
)

# The symbol through which MLX multiplies; a library without it is no full CBLAS.
_NEEDED = b"\0cblas_sgemm\0"
_LDCONFIG_LINE = re.compile(r"^\s*(?P<name>lib\S+) \(.*\) => (?P<path>/\S+)$", re.MULTILINE)
# "64" marks builds with 64-bit integers, which MLX does not call.
_OPENBLAS = re.compile(r"libopenblas[a-z]?(?:-r[0-9.]+)?\.so(?:\.[0-9.]+)?")
_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"),
    *("/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/OpenBLAS/lib"),
)


@dataclass(frozen=True, slots=True)
class Library:
    """A BLAS to preload. The path has no links in it, as in a process's memory map."""

    name: Literal["openblas", "mkl"]
    path: str


def find(kind: Kind, prefix: str = sys.prefix, platform: str = sys.platform) -> Library | None:
    """The library to preload, if one of this kind is there. `auto`: OpenBLAS, else MKL.

    Args:
        prefix: the environment into which the `mkl` wheel would have been installed.
    """
    if not platform.startswith("linux"):
        return None
    if kind in {"auto", "openblas"}:
        path = best_openblas(_system_openblas())
        if path is not None:
            return Library("openblas", str(path))
    if kind in {"auto", "mkl"}:
        found = [path for path in Path(prefix, "lib").glob("libmkl_rt.so.*") if _usable(path)]
        if found:
            return Library("mkl", str(max(found).resolve()))
    return None


def environment(library: Library | None, preloaded: str | None = None) -> dict[str, str]:
    """The variables that put a library into a process started with them.

    Args:
        preloaded: `LD_PRELOAD` as it would have been without.
    """
    if library is None:
        return {}
    paths = library.path if not preloaded else f"{library.path}:{preloaded}"
    if library.name == "openblas":
        return {"LD_PRELOAD": paths}
    # MKL's own defaults, but told: other values in the daemon's environment would break it.
    return {"LD_PRELOAD": paths, "MKL_INTERFACE_LAYER": "LP64", "MKL_THREADING_LAYER": "INTEL"}


def identify(maps: str) -> Blas:
    """Which BLAS a process uses, from the text of its `/proc/PID/maps`.

    One that was preloaded shadows the reference one, which stays mapped. Preloading a wrong path
    fails silently, so that this is the only proof. NumPy's own copy, `libscipy_openblas64_`, does
    not count: MLX never calls it.
    """
    paths = dict.fromkeys(match[0] for match in re.finditer(r"/\S[^\n]*$", maps, re.MULTILINE))
    for name, pattern in (
        ("openblas", _OPENBLAS),
        ("mkl", re.compile(r"libmkl_rt\.so.*")),
        ("reference", re.compile(r"libblas[-.].*")),
    ):
        for path in paths:
            if pattern.fullmatch(os.path.basename(path)):  # noqa: PTH119 - not only of this system
                return Blas(name, path)
    return Blas("none", None)


def best_openblas(candidates: Iterable[Path]) -> Path | None:
    """The full CBLAS among these files for this machine; threaded builds before serial ones."""
    usable = {path.resolve() for path in candidates if _usable(path)}
    return min(usable, key=_preference, default=None)


def _preference(path: Path) -> tuple[int, str]:
    # libopenblasp: POSIX threads; libopenblaso: OpenMP; without a letter it is serial on Fedora,
    # and whatever its folder says on Debian.
    text = str(path)
    for rank, mark in enumerate(
        ("libopenblasp", "openblas-pthread", "libopenblaso", "openblas-openmp")
    ):
        if mark in text:
            return rank, text
    return 9 if "serial" in text else 5, text


def _system_openblas() -> Iterator[Path]:
    # The cache of the dynamic linker knows folders that nobody would guess; ldconfig is often not
    # on the path of people who are not root.
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is not None:
        printed = subprocess.run(
            [ldconfig, "-p"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        ).stdout
        for match in _LDCONFIG_LINE.finditer(printed.decode(errors="replace")):
            if _OPENBLAS.fullmatch(match["name"]):
                yield Path(match["path"])
    for folder in _FOLDERS:
        for path in Path(folder).glob("libopenblas*.so*"):
            if _OPENBLAS.fullmatch(path.name):
                yield path


def _usable(path: Path) -> bool:
    """Whether this interpreter could preload the file, and it is a full CBLAS."""
    if re.search(r"[\s:]", str(path.resolve())):  # LD_PRELOAD separates by these, and has no quotes
        return False
    try:
        with path.open("rb") as file, Path(sys.executable).open("rb") as interpreter:
            if _elf_target(file.read(20)) != _elf_target(interpreter.read(20)):
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(_NEEDED) >= 0
    except (OSError, ValueError):  # gone, unreadable or empty
        return False


def _elf_target(header: bytes) -> bytes:
    return header[:5] + header[18:20]  # magic and word size, machine


if __name__ == "__main__":
    # For the Makefile: says what engines will use; the status tells whether there is one.
    chosen = find("auto")
    print(chosen.path if chosen else ADVICE)  # noqa: T201
    sys.exit(chosen is None)
