"""The C++ compiler that MLX calls on a Linux CPU, told for which machine it compiles.

MLX fuses elementwise operations by having `g++ -O3` compile them at run time,
for the oldest x86-64 and without leave to inline. So `exp` is a function call for
each element: SiLU took 16 ns an element, and takes 0.6 with these flags, which was
a quarter of a small model's prefill. None of them changes what is computed, apart
from products and sums that the machine does in one rounding instead of two.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

FLAGS = (
    "-march=native",
    # A shared object's functions can be replaced at run time, and are not inlined for it.
    "-fno-semantic-interposition",
    "-finline-limit=2000",
    # Nobody looks at the floating-point flags or at errno.
    "-fno-trapping-math",
    "-fno-math-errno",
)
_CPU = re.compile(r"^(?:model name|flags|CPU part|Features)\s*:.*$", re.MULTILINE)


def install(
    environment: MutableMapping[str, str], folder: Path, cpu: str | None = None
) -> Path | None:
    """Have MLX find a `g++` that adds the flags, and keep what it builds apart.

    Before MLX compiles anything; takes effect through PATH and TMPDIR.

    Args:
        environment: of this process; changed in place.
        folder: the engine's own, kept between runs.
        cpu: what describes this machine; None = the kernel's account of it.

    Returns:
        The compiler's wrapper, or None where there is no g++ or it does not take the flags.

    Raises:
        OSError: the folder cannot be written.
    """
    compiler = shutil.which("g++", path=environment.get("PATH"))
    if compiler is None or not _takes_flags(compiler):
        return None
    if cpu is None:
        cpu = "\n".join(sorted(set(_CPU.findall(Path("/proc/cpuinfo").read_text()))))
    # What is compiled for one machine can kill the process on another that shares the folder.
    mark = hashlib.sha256("\n".join((compiler, *FLAGS, cpu)).encode()).hexdigest()[:16]
    home = folder / f"native-{mark}"
    home.mkdir(mode=0o700, exist_ok=True)
    wrapper = home / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join((compiler, *FLAGS))} "$@"\n')
    wrapper.chmod(0o700)
    environment["TMPDIR"] = str(home)
    environment["PATH"] = os.pathsep.join((str(home), environment.get("PATH", os.defpath)))
    return wrapper


def _takes_flags(compiler: str) -> bool:
    """Whether the compiler knows this machine and the flags: clang, or an old GCC, may not."""
    tried = subprocess.run(
        [compiler, *FLAGS, "-fsyntax-only", "-x", "c++", "-"],
        input=b"int main() { return 0; }",
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        words = tried.stderr.decode(errors="replace").strip().splitlines()
        print(f"{compiler} cannot compile for this machine: {words[:1]}", file=sys.stderr)  # noqa: T201
    return tried.returncode == 0
