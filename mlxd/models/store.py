"""Folders that are either whole or not there."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

#: What the kinds of tokenizers keep their vocabularies in; one of them is enough.
_VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "*vocab*")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # parameter -> file


def build_once(folder: Path, build: Callable[[Path], None], report: Callable[[str], None]) -> Path:
    """The folder, built unless it is there already. Two at once: one builds, the other waits.

    Args:
        build: fills the empty folder that it is given, which becomes `folder` when it returns.

    Raises:
        OSError: the cache cannot be written.
        Exception: what `build` raised; nothing is left behind but its unfinished folder, which
            the next attempt removes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock"), report):
        if not folder.exists():
            unfinished = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    # The kernel drops the lock with its holder, however that one ends.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def missing_from(folder: Path) -> str | None:
    """What keeps a folder from being a model in MLX's layout, or None."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / "config.json").is_file():
        return "no config.json in it"
    return _missing_weights(folder) or _missing_vocabulary(folder)


def _missing_weights(folder: Path) -> str | None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.MsgspecError:
            return f"{index.name} is no index of weights"
        absent = sorted(part for part in parts if not (folder / part).is_file())
        return f"no {absent[0]} in it, which {index.name} names" if absent else None
    if next(folder.glob("*.safetensors"), None) is None:
        return "no *.safetensors in it"
    return None


def _missing_vocabulary(folder: Path) -> str | None:
    if any(next(folder.glob(pattern), None) is not None for pattern in _VOCABULARIES):
        return None
    return "no tokenizer in it (tokenizer.json or another kind of vocabulary)"
