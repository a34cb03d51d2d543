"""Settings as the admin API shows them, and changes without the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from mlxd.config.settings import Settings
from mlxd.errors import ConfigError

#: Tables of a model that can be changed in a running daemon.
LiveTable = Literal["batch", "policy"]

_MASK = "***"


def shown(settings: Settings) -> dict[str, Any]:
    """The settings as JSON, with what may be a secret masked: values of engines' variables, and
    of a URL its user and password and its query.
    """
    tree: dict[str, Any] = settings.model_dump(mode="json")
    for model in tree["models"].values():
        model["env"] = dict.fromkeys(model["env"], _MASK)
    if settings.traces.endpoint is not None:
        tree["traces"]["endpoint"] = _masked(settings.traces.endpoint)
    return tree


def _masked(url: str) -> str:
    parts = urlsplit(url)
    _user, at, host = parts.netloc.rpartition("@")
    netloc = f"{_MASK}@{host}" if at else host
    return parts._replace(netloc=netloc, query=_MASK if parts.query else "").geturl()


def patched(
    settings: Settings, model_id: str, table: LiveTable, changes: Mapping[str, object]
) -> Settings:
    """The settings with some keys of one table changed, which then count as written.

    Raises:
        ConfigError: unknown keys, wrong types, impossible values: all of them.
    """
    model = settings.models[model_id]
    old = model.batch if table == "batch" else model.policy
    written = {name: value for name, value in old if name in old.model_fields_set}
    try:
        new = type(old).model_validate({**written, **changes})
    except ValidationError as error:
        raise ConfigError(
            [
                f"models.{model_id}.{table}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            ]
        ) from error
    models = {**settings.models, model_id: model.model_copy(update={table: new})}
    return settings.model_copy(update={"models": models})
