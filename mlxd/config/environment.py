"""The settings source for the environment: which variable sets which key.

pydantic-settings' own source would make a second model of `MLXD_MODELS__MY_MODEL__…`, because a
variable's name cannot say which of `-`, `.` and `_` an id has. Here names are matched against
the ids that exist.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from mlxd.config.settings import (
    AdminSettings,
    DefaultsSettings,
    LogSettings,
    MemorySettings,
    MetricsSettings,
    ModelSettings,
    ServerSettings,
    TracesSettings,
)
from mlxd.config.toml_lines import Path

PREFIX = "MLXD_"
CONFIG_VARIABLE = "MLXD_CONFIG"
MODELS_VARIABLE = "MLXD_MODELS"


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the environment says, by key path."""

    values: dict[Path, Any] = field(default_factory=dict)
    variables: dict[Path, str] = field(default_factory=dict)  # which variable said it
    problems: list[str] = field(default_factory=list)


def read(environ: Mapping[str, str], file_ids: Iterable[str]) -> Overrides:
    """Every `MLXD_*` variable as the value of a key; what cannot be one is a problem.

    Args:
        file_ids: ids of the models in the file.
    """
    found = Overrides()
    given = {
        name: text
        for name, text in sorted(environ.items())
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE
    }
    if MODELS_VARIABLE in given:
        _read_models(given.pop(MODELS_VARIABLE), found)
    ids = {*file_ids, *(path[1] for path in found.values)}
    keys = dict(_known(ids))
    for name, text in given.items():
        if name in keys:
            path, annotation = keys[name]
            found.values[path] = text if _is_text(annotation) else _json_or_text(text)
            found.variables[path] = name
        else:
            found.problems.append(f"{name}: {_unknown(name, keys, ids)}")
    return found


def _read_models(text: str, found: Overrides) -> None:
    expected = "expected a JSON object of models, each a table as in the file"
    try:
        models = json.loads(text)
    except json.JSONDecodeError as error:
        found.problems.append(f"{MODELS_VARIABLE}: {expected}; {error}")
        return
    if not isinstance(models, dict):
        found.problems.append(f"{MODELS_VARIABLE}: {expected}")
        return
    for model_id, table in models.items():
        found.values["models", model_id] = table
        found.variables["models", model_id] = MODELS_VARIABLE


def _known(ids: Iterable[str]) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """The variables that exist, each with the path and the type of its key."""
    tables: list[tuple[str, Path, type[BaseModel]]] = [
        ("SERVER", ("server",), ServerSettings),
        ("ADMIN", ("admin",), AdminSettings),
        ("METRICS", ("metrics",), MetricsSettings),
        ("TRACES", ("traces",), TracesSettings),
        ("LOG", ("log",), LogSettings),
        ("MEMORY", ("memory",), MemorySettings),
        ("DEFAULTS", ("defaults",), DefaultsSettings),
    ]
    for segment, spelled_so in _by_segment(ids).items():
        # A "_" at the end would run into the separator.
        if len(spelled_so) == 1 and "__" not in f"{segment}_":
            tables.append((f"MODELS__{segment}", ("models", spelled_so[0]), ModelSettings))
    for prefix, path, table in tables:
        for keys, annotation in leaves(table):
            name = "__".join((prefix, *keys)).upper()
            yield f"{PREFIX}{name}", (path + keys, annotation)


def leaves(table: type[BaseModel]) -> Iterator[tuple[Path, Any]]:
    """Every key of a table that is no table itself, with its type."""
    for name, info in table.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for keys, annotation in leaves(info.annotation):
                yield (name, *keys), annotation
        else:
            yield (name,), info.annotation


def _by_segment(ids: Iterable[str]) -> dict[str, list[str]]:
    segments: dict[str, list[str]] = {}
    for model_id in sorted(ids):
        segment = model_id.upper().replace(".", "_").replace("-", "_")
        segments.setdefault(segment, []).append(model_id)
    return segments


def _is_text(annotation: object) -> bool:
    return annotation is str or (
        get_origin(annotation) is Literal
        and all(isinstance(value, str) for value in get_args(annotation))
    )


def _json_or_text(text: str) -> object:
    # What is no JSON stays text: a duration, a size, or a wrong type for validation to name.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _unknown(name: str, known: Iterable[str], ids: Iterable[str]) -> str:
    for segment, spelled_so in _by_segment(ids).items():
        if name.startswith(f"{PREFIX}MODELS__{segment}__"):
            if len(spelled_so) > 1:
                return (
                    f"the models {' and '.join(spelled_so)} have the same name in variables; "
                    f"set their keys in the file or through {MODELS_VARIABLE}"
                )
            if "__" in f"{segment}_":
                return (
                    f"the name of {spelled_so[0]} has the separator in it; "
                    f"set its keys in the file or through {MODELS_VARIABLE}"
                )
    known = sorted(known)
    under = [other for other in known if other.startswith(f"{name}__")]
    if under:
        return f"names a table; expected one of its keys, such as {under[0]}"
    close = difflib.get_close_matches(name, [*known, CONFIG_VARIABLE, MODELS_VARIABLE], n=1)
    return "unknown variable" + (f"; expected one such as {close[0]}" if close else "")
