"""Validation errors as sentences: where a value was written, what it is, what was expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlxd.config.toml_lines import Path

# Values that may be secrets must reach no answer and no log; of files, the problem tells the path.
_UNSHOWN = {"env", "api_keys_file", "token_file", "endpoint"}


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each key was written."""

    file: str
    lines: Mapping[Path, int]
    variables: Mapping[Path, str]

    def of(self, path: Path) -> str:
        """The variable, or the file with the line of the key or of the nearest table around it."""
        for prefix in _prefixes(path):
            if prefix in self.variables:
                return self.variables[prefix]
        line = self.line(path)
        return self.file if line is None else f"{self.file}:{line}"

    def line(self, path: Path) -> int | None:
        """The line of the key or of the nearest table around it, if the file has one."""
        return next(
            (self.lines[prefix] for prefix in _prefixes(path) if prefix in self.lines), None
        )


def _prefixes(path: Path) -> list[Path]:
    return [path[:length] for length in range(len(path), 0, -1)]


def describe(
    error: ValidationError, root: type[BaseModel], origins: Origins, above: Path = ()
) -> dict[Path, str]:
    """One sentence for each wrong key.

    Args:
        root: the type that was validated.
        above: the key path at which it stands.
    """
    found = {}
    for details in error.errors(include_url=False):
        path = above + _path(details)
        found[path] = f"{origins.of(path)}: {dotted(path)}: {_what(details, root)}"
    return found


def dotted(path: Path) -> str:
    """The key path as TOML spells it."""
    return ".".join(
        part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part) for part in path
    )


def _path(details: ErrorDetails) -> Path:
    # pydantic marks a wrong key of a mapping with a "[key]" behind it.
    return tuple(str(part) for part in details["loc"] if part != "[key]")


def _what(details: ErrorDetails, root: type[BaseModel]) -> str:
    kind, value, path = details["type"], details["input"], _path(details)
    if kind == "missing":
        field = _table_at(root, path[:-1]).model_fields[path[-1]]
        return f"missing; expected {field.description}"
    if kind == "extra_forbidden":
        return _unknown_key(path, value, list(_table_at(root, path[:-1]).model_fields))
    own = kind == "value_error"
    expected = str(details["ctx"]["error"]) if own else _expected(details["msg"])
    unshown = _UNSHOWN & {*path} or isinstance(value, BaseModel)  # a table that nobody wrote
    return expected if unshown else f"{expected}, got {_shown(value)}"


def _expected(message: str) -> str:
    for start, ours in (
        ("Input should be a valid dictionary", "expected a table"),
        ("Input should be a valid tuple", "expected an array"),
        ("Input should be greater", "expected a value greater"),
        ("Input should be less", "expected a value less"),
        ("Input should be ", "expected "),
    ):
        if message.startswith(start):
            # "expected a table" replaces the whole sentence, which speaks of Python's types.
            rest = "" if ours.endswith(("table", "array")) else message.removeprefix(start)
            return ours + rest
    return message


def _unknown_key(path: Path, value: object, known: list[str]) -> str:
    if len(path) == 3 and path[0] == "models" and isinstance(value, dict):
        return (
            f"unknown table; an id with a dot is quoted: [models.{json.dumps('.'.join(path[1:]))}]"
        )
    close = difflib.get_close_matches(path[-1], known, n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return f"unknown key; expected one of {', '.join(known)}"


def _table_at(root: type[BaseModel], path: Path) -> type[BaseModel]:
    table: Any = root
    for part in path:
        if isinstance(table, type) and issubclass(table, BaseModel):
            table = table.model_fields[part].annotation
        else:  # a mapping of ids to tables
            table = get_args(table)[1]
    assert isinstance(table, type)  # noqa: S101 - pydantic only reports keys of tables
    return table


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
