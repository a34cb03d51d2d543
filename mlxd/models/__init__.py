"""Where models come from: sources, and how each becomes a folder in MLX's layout."""

from __future__ import annotations

from mlxd.models.fetching import fetch, local_path
from mlxd.models.sources import (
    Folder,
    GgufFile,
    Repository,
    Source,
    SourceError,
    Starter,
    parse,
)

__all__ = [
    "Folder",
    "GgufFile",
    "Repository",
    "Source",
    "SourceError",
    "Starter",
    "fetch",
    "local_path",
    "parse",
]
