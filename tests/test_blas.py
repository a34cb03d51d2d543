"""Finding a fast BLAS, preloading it, and knowing which one is really used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd import blas
from mlxd.blas import Library, best_openblas, environment, find, identify
from mlxd.wire import Blas

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

NUMPYS_OWN = "/env/numpy.libs/libscipy_openblas64_-32a4b2a6.so"
REFERENCE = "/env/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0"
OPENBLAS = "/usr/lib/openblas-pthread/libopenblasp-r0.3.21.so"


def maps(*paths: str) -> str:
    """What /proc/PID/maps says of a process with these files."""
    rows = [f"7f00-7f01 r-xp 00000000 08:01 42      {path}" for path in paths]
    return "\n".join(["0040-0041 rw-p 00000000 00:00 0", *rows, "7fff-8000 rw-p 0 00:00 0 [stack]"])


class TestIdentify:
    """Which BLAS a process uses."""

    def test_numpys_own_openblas_is_not_what_mlx_uses(self) -> None:
        """It is mapped in every process that imports numpy, and MLX never calls it."""
        assert identify(maps(NUMPYS_OWN, REFERENCE)) == Blas("reference", REFERENCE)

    def test_a_preloaded_library_shadows_the_reference(self) -> None:
        """The reference stays mapped, because MLX was linked with it."""
        assert identify(maps(REFERENCE, NUMPYS_OWN, OPENBLAS)) == Blas("openblas", OPENBLAS)

    @pytest.mark.parametrize(
        ("name", "path"),
        [
            ("openblas", "/usr/lib/libopenblas.so.0.3"),
            ("openblas", "/usr/lib64/libopenblaso-r0.3.29.so"),
            ("openblas", "/my libs/libopenblas.so"),
            ("mkl", "/env/lib/libmkl_rt.so.3"),
            ("reference", "/usr/lib/blas/libblas.so.3.12.0"),
        ],
    )
    def test_libraries_are_known_by_their_files(self, name: str, path: str) -> None:
        """As distributions and wheels call them."""
        assert identify(maps(path)) == Blas(name, path)

    @pytest.mark.parametrize(
        "path",
        [
            "/usr/lib64/libopenblas64.so.0",
            "/usr/lib64/libopenblasp64-r0.3.29.so",
            "/env/numpy.libs/libopenblas64_p-r0-15028c96.3.21.so",
            "/usr/lib/liblapack.so.3",
            "/home/libopenblas.so/file",
        ],
    )
    def test_builds_that_mlx_cannot_call_do_not_count(self, path: str) -> None:
        """Those with 64-bit integers have other symbols."""
        assert identify(maps(path)) == Blas("none", None)

    def test_a_process_without_any_has_none(self) -> None:
        """An engine on a GPU may map none."""
        assert identify("") == Blas("none", None)


class TestEnvironment:
    """How a library gets into a process."""

    def test_nothing_is_set_for_no_library(self) -> None:
        """`blas = "none"` leaves the engine's environment alone."""
        assert environment(None, "/x.so") == {}

    def test_a_library_comes_before_what_was_preloaded(self) -> None:
        """An LD_PRELOAD of the daemon's own is kept."""
        assert environment(Library("openblas", "/b.so")) == {"LD_PRELOAD": "/b.so"}
        assert environment(Library("openblas", "/b.so"), "/x.so") == {"LD_PRELOAD": "/b.so:/x.so"}

    def test_mkl_is_told_its_layers(self) -> None:
        """Other values in the daemon's environment would give wrong integers or no threads."""
        assert environment(Library("mkl", "/m.so")) == {
            "LD_PRELOAD": "/m.so",
            "MKL_INTERFACE_LAYER": "LP64",
            "MKL_THREADING_LAYER": "INTEL",
        }


@linux_only
class TestFind:
    """Which library is taken."""

    def library(self, path: Path, symbols: bytes = b"\0cblas_sgemm\0") -> Path:
        """A file that looks like a library for this machine."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(sys.executable).read_bytes()[:64] + symbols)
        return path

    def test_threaded_builds_come_before_serial_ones(self, tmp_path: Path) -> None:
        """POSIX threads, then OpenMP, then what does not say."""
        serial = self.library(tmp_path / "libopenblas-r0.so")
        openmp = self.library(tmp_path / "libopenblaso-r0.so")
        posix = self.library(tmp_path / "libopenblasp-r0.so")

        assert best_openblas([serial, openmp, posix]) == posix
        assert best_openblas([serial, openmp]) == openmp
        assert best_openblas([serial]) == serial
        assert best_openblas([]) is None

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """A memory map shows real paths, so that only those can be compared."""
        real = self.library(tmp_path / "libopenblasp-r0.so")
        link = tmp_path / "libopenblas.so.0"
        link.symlink_to(real)

        assert best_openblas([link]) == real

    def test_what_cannot_be_preloaded_is_passed_over(self, tmp_path: Path) -> None:
        """No CBLAS, another machine's, empty, gone, or a path that LD_PRELOAD would split."""
        other = tmp_path / "other.so"
        other.write_bytes(b"\x7fELF\x01" + bytes(13) + b"\xff\xff" + b"\0cblas_sgemm\0")
        empty = tmp_path / "empty.so"
        empty.touch()
        candidates = [
            self.library(tmp_path / "fortran.so", symbols=b"\0sgemm_\0"),
            self.library(tmp_path / "a b" / "lib.so"),
            *(other, empty, tmp_path / "gone.so"),
        ]

        assert best_openblas(candidates) is None

    def test_mkl_is_found_in_the_environment_it_was_installed_into(self, tmp_path: Path) -> None:
        """The wheel puts its libraries beside the interpreter's own."""
        path = self.library(tmp_path / "lib/libmkl_rt.so.3")

        assert find("mkl", prefix=str(tmp_path)) == Library("mkl", str(path))
        assert find("mkl", prefix=str(tmp_path / "elsewhere")) is None

    def test_none_finds_nothing(self) -> None:
        """A model can be told to use what MLX was linked with."""
        assert find("none") is None

    def test_macos_needs_nothing(self) -> None:
        """Accelerate is there, and LD_PRELOAD is not."""
        assert find("auto", platform="darwin") is None

    def test_what_is_found_is_what_a_process_then_uses(self) -> None:
        """The preloaded library's real path is in the memory map of a process that runs MLX."""
        library = find("auto")
        if library is None:
            pytest.skip(blas.ADVICE)
        script = "import mlx.core, pathlib; print(pathlib.Path('/proc/self/maps').read_text())"
        printed = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment(library)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

        assert identify(printed) == Blas(library.name, library.path)
