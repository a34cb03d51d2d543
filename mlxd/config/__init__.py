"""The configuration: strict frozen settings, and the only reader of files and environment.

`load` reads a file; every key can also be set by a variable, `MLXD_SERVER__LISTEN` for
`server.listen`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mlxd.config.environment import CONFIG_VARIABLE
from mlxd.config.live import LiveTable, patched, shown
from mlxd.config.loading import load
from mlxd.config.secrets import (
    ApiKey,
    KeyRing,
    Secret,
    TokenFile,
    open_to_all,
    parse_keys,
    read_token,
)
from mlxd.config.settings import (
    AdminSettings,
    BatchSettings,
    LogSettings,
    MemorySettings,
    MetricsSettings,
    ModelSettings,
    PolicySettings,
    SamplingSettings,
    ServerSettings,
    Settings,
    TracesSettings,
)
from mlxd.config.values import Address, TcpAddress, UnixAddress, parse_listen
from mlxd.errors import ConfigError

__all__ = [
    "CONFIG_VARIABLE",
    "Address",
    "AdminSettings",
    "ApiKey",
    "BatchSettings",
    "KeyRing",
    "LiveTable",
    "LogSettings",
    "MemorySettings",
    "MetricsSettings",
    "ModelSettings",
    "PolicySettings",
    "SamplingSettings",
    "Secret",
    "ServerSettings",
    "Settings",
    "TcpAddress",
    "TokenFile",
    "TracesSettings",
    "UnixAddress",
    "cache_dir",
    "etag",
    "load",
    "open_to_all",
    "parse_keys",
    "parse_listen",
    "patched",
    "read_token",
    "shown",
]


def etag(settings: Settings) -> str:
    """A short hash of the effective configuration: equal for equal settings."""
    canonical = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def cache_dir(
    server: ServerSettings, environ: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Path:
    """The folder for fetched models and compiled kernels; it may not exist yet.

    Raises:
        ConfigError: it is to be under the user's home, and the user has none.
    """
    if server.cache_dir != "auto":
        return Path(server.cache_dir)
    # An XDG path that is not absolute is to be ignored, says its specification.
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if platform != "darwin" and xdg.is_absolute():
        return xdg / "mlxd"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ConfigError(["server.cache_dir: expected a folder, as there is no home"]) from error
    return home / ("Library/Caches/mlxd" if platform == "darwin" else ".cache/mlxd")
