"""GGUF files as folders in MLX's layout."""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from pathlib import Path

from mlxd.models.sources import SourceError

_SHOWN_LINES = 5


def cache_name(path: Path) -> str:
    """A folder name that changes when the file does.

    Raises:
        SourceError: there is no such file.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    identity = f"{path.absolute()}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def convert(path: Path, folder: Path, dtype: str | None) -> None:
    """Write the file's model into an empty folder. Takes seconds to minutes.

    Args:
        dtype: of the weights; None = the converter's choice.

    Raises:
        SourceError: it cannot be converted.
    """
    import gguf2mlx  # noqa: PLC0415 - takes seconds, and brings transformers

    said = io.StringIO()
    # What it warns of is kept in the folder, in its conversion_report.json.
    with contextlib.redirect_stdout(said), warnings.catch_warnings(action="ignore"):
        converted = gguf2mlx.convert(str(path), str(folder), dtype=dtype)
    if not converted:
        last = "; ".join(said.getvalue().strip().splitlines()[-_SHOWN_LINES:])
        raise SourceError(f"{path.name} cannot be converted: {last}")
