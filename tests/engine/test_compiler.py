"""MLX's compiler on a Linux CPU compiles for this machine, or is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd.engine.compiler import FLAGS, install


def _compiler(folder: Path, script: str) -> dict[str, str]:
    """An environment whose only g++ is this shell script."""
    folder.mkdir()
    fake = folder / "g++"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o700)
    return {"PATH": str(folder)}


def test_the_wrapper_hands_the_compiler_its_flags_and_everything_else(tmp_path: Path) -> None:
    """The flags come first, so that MLX's own have the last word; quoting survives."""
    environment = _compiler(tmp_path / "a bin", 'for each in "$@"; do echo "$each"; done')
    wrapper = install(environment, tmp_path)
    assert wrapper is not None
    said = subprocess.run(
        ["/bin/sh", "-c", 'g++ -O3 "a file.cpp"'],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.splitlines() == [*FLAGS, "-O3", "a file.cpp"]
    assert Path(environment["TMPDIR"]) == wrapper.parent
    assert environment["PATH"].split(os.pathsep)[0] == str(wrapper.parent)


def test_without_a_compiler_nothing_changes(tmp_path: Path) -> None:
    """MLX does not fuse then, and says nothing about it either."""
    environment = {"PATH": str(tmp_path)}
    assert install(environment, tmp_path) is None
    assert environment == {"PATH": str(tmp_path)}


def test_a_compiler_that_refuses_the_flags_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine's log has what it said, once."""
    environment = _compiler(tmp_path / "bin", 'echo "unknown argument: $1" >&2; exit 1')
    before = dict(environment)
    assert install(environment, tmp_path) is None
    assert environment == before
    assert f"unknown argument: {FLAGS[0]}" in capfd.readouterr().err


def test_two_machines_that_share_a_folder_keep_their_kernels_apart(tmp_path: Path) -> None:
    """Code for the one may be an illegal instruction on the other."""
    homes = []
    for number, cpu in enumerate(("with avx512", "without", "with avx512")):
        environment = _compiler(tmp_path / f"bin{number}", "exit 0")
        environment["PATH"] = str(tmp_path / "bin0")
        install(environment, tmp_path, cpu)
        homes.append(environment["TMPDIR"])
    assert homes[0] == homes[2] != homes[1]


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs a Linux g++"
)
def test_mlx_compiles_with_it(tmp_path: Path) -> None:
    """The real MLX and the real g++: what was fused lies in the folder, and computes."""
    program = (
        "import os, sys; from pathlib import Path; from mlxd.engine import compiler\n"
        "compiler.install(os.environ, Path(sys.argv[1]))\n"
        "import mlx.core as mx; mx.set_default_device(mx.cpu)\n"
        "f = mx.compile(lambda x: mx.exp(x) * 2 + x)\n"
        "print(f(mx.array([0.0, 1.0])).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert [round(value, 4) for value in eval(done.stdout)] == [2.0, 6.4366]  # noqa: S307
    assert list(tmp_path.glob("native-*/mlx/**/*.so"))
