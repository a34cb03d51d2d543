"""What a model's `source` can be. Pure: nothing here looks at a disk or a network."""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPECTED = (
    'a folder ("/models/x", "./x", "~/x"), a ".gguf" file, a Hugging Face repository '
    '("owner/name" or "owner/name@revision") or "starter:NAME"'
)

_REPOSITORY = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@(?P<rev>[^\s@]+))?"
)
_FOLDER_STARTS = ("/", "./", "../", "~")

STARTER_NAMES = ("smollm2-135m-instruct",)


@dataclass(frozen=True, slots=True)
class Starter:
    """A small model from the package index, for a first run."""

    name: str


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder in MLX's layout: config.json and safetensors."""

    path: str


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A .gguf file, converted once into the cache."""

    path: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hugging Face hub; no revision means its main branch."""

    repo: str
    revision: str | None = None


Source = Starter | Folder | GgufFile | Repository


def parse(text: str) -> Source:
    """The source that a `source` key names.

    Raises:
        ValueError: it names none.
    """
    if text.startswith("starter:"):
        name = text.removeprefix("starter:")
        if name not in STARTER_NAMES:
            raise ValueError(f'expected "starter:{STARTER_NAMES[0]}"')
        return Starter(name)
    if text.endswith(".gguf"):
        return GgufFile(text)
    if text in {".", ".."} or text.startswith(_FOLDER_STARTS):
        return Folder(text)
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in match["repo"]:
        raise ValueError(f"expected {EXPECTED}")
    return Repository(match["repo"], match["rev"])


class SourceError(Exception):
    """The model cannot be had; the message says why and, where there is one, what helps."""
