"""Reading the file and the environment into `Settings`, or into every problem they have."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from mlxd.config import environment, toml_lines, values
from mlxd.config.problems import Origins, describe, dotted
from mlxd.config.settings import DefaultsSettings, Settings
from mlxd.errors import ConfigError

Tree = dict[str, Any]


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """The settings of a file, with the environment's `MLXD_*` variables laid over it.

    Raises:
        ConfigError: with every problem of both, each naming the key, the file and line or the
            variable, and what was expected.
    """
    file, text = _read(path)
    overrides = environment.read(environ, file["models"] if _has_models(file) else ())
    tree = _merge(file, overrides.values)
    origins = Origins(str(path), toml_lines.key_lines(text), overrides.variables)
    context = {values.FOLDER: path.absolute().parent}
    found = _take_defaults(tree, origins, context) | _name_clashes(tree, origins)
    try:
        settings = Settings.model_validate(tree, context=context)
    except ValidationError as error:
        found |= describe(error, Settings, origins)
    if found or overrides.problems:
        in_order = sorted(found, key=lambda key: origins.line(key) or 0)
        raise ConfigError([*(found[key] for key in in_order), *overrides.problems])
    return settings


def _read(path: Path) -> tuple[Tree, str]:
    try:
        # The text first: pydantic-settings takes a file that is not there for an empty one.
        text = path.read_text("utf-8")
        return TomlConfigSettingsSource(BaseSettings, path).toml_data, text
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: expected TOML: {error}"]) from error


def _has_models(tree: Tree) -> bool:
    return isinstance(tree.get("models"), dict)


def _merge(file: Tree, overrides: Mapping[toml_lines.Path, Any]) -> Tree:
    above: Tree = {}
    for path, value in overrides.items():
        _put(above, path, value)

    class Sources(BaseSettings):
        """The two trees as one, not yet validated; the first source wins."""

        model_config = SettingsConfigDict(extra="allow")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base's signature
            env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                InitSettingsSource(settings_cls, above),
                # Merging goes into tables; what is overridden is replaced whole.
                InitSettingsSource(settings_cls, _without(file, overrides)),
            )

    return Sources().model_extra or {}


def _put(tree: Tree, path: toml_lines.Path, value: object) -> None:
    *parents, key = path
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):  # wrong already, and reported as such
            return
        tree = child
    tree[key] = value


def _without(tree: Tree, gone: Collection[toml_lines.Path], above: toml_lines.Path = ()) -> Tree:
    return {
        key: _without(value, gone, (*above, key)) if isinstance(value, dict) else value
        for key, value in tree.items()
        if (*above, key) not in gone
    }


def _take_defaults(
    tree: Tree, origins: Origins, context: Mapping[str, Any]
) -> dict[toml_lines.Path, str]:
    """Move `[defaults]` under every model's own tables; returns what is wrong with it."""
    defaults = tree.pop("defaults", {})
    found: dict[toml_lines.Path, str] = {}
    try:
        DefaultsSettings.model_validate(defaults, context=context)
    except ValidationError as error:
        found = describe(error, DefaultsSettings, origins, above=("defaults",))
        if not isinstance(defaults, dict):
            return found
        # Told once, here, and not again in every model.
        defaults = _without({"defaults": defaults}, found)["defaults"]
    models = tree["models"].values() if _has_models(tree) else ()
    for model in models:
        for section, values_ in defaults.items():
            own = model.get(section, {}) if isinstance(model, dict) else None
            if isinstance(own, dict):
                model[section] = {**values_, **own}
    return found


def _name_clashes(tree: Tree, origins: Origins) -> dict[toml_lines.Path, str]:
    """Aliases that are another model's id or alias: a name must mean one model."""
    models = tree["models"] if _has_models(tree) else {}
    owners = {model_id: model_id for model_id in models}
    found: dict[toml_lines.Path, str] = {}
    for model_id, model in models.items():
        aliases = model.get("aliases") if isinstance(model, dict) else None
        path = ("models", model_id, "aliases")
        for alias in aliases if isinstance(aliases, list) else ():
            if not isinstance(alias, str):  # wrong already, and reported as such
                continue
            taken = alias in owners
            owner = owners.setdefault(alias, model_id)
            if taken:
                found[path] = (
                    f"{origins.of(path)}: {dotted(path)}: {alias!r} already names {owner}; "
                    "expected names that are free"
                )
    return found
