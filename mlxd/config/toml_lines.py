"""Where in a TOML file a key stands: `tomllib` gives values without their lines."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

Path = tuple[str, ...]

# Only ever used on documents that tomllib has accepted, so that strings are known to be closed.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
    r"|#[^\n]*"
    r"|[A-Za-z0-9_-]+"
    r"|.",
    re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every table header and `key =` of a valid TOML document.

    Keys inside inline tables are not in it: they stand on their parent's line.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            key = table = _key(tokens)
        else:
            key = table + _key(tokens[: tokens.index("=")])
        # Tables that no header of their own opens begin where something in them does.
        for length in range(1, len(key) + 1):
            lines.setdefault(key[:length], line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Headers and assignments, each with its first line and its tokens that are not blank."""
    line, start, depth = 1, 1, 0
    tokens: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "\n" and depth == 0:
            if tokens:
                yield start, tokens
            tokens = []
        elif not token.isspace() and not token.startswith("#"):
            if not tokens:
                start = line
            depth += (token in "[{") - (token in "]}")
            tokens.append(token)
        line += token.count("\n")
    if tokens:
        yield start, tokens


def _key(tokens: list[str]) -> Path:
    return tuple(_name(token) for token in tokens if token not in "[].")


def _name(token: str) -> str:
    if token[0] in "\"'":
        name: str = tomllib.loads(f"name = {token}")["name"]
        return name
    return token
