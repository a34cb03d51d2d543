"""Secrets, and the files that they stand in.

A secret is read once, into a value that shows itself in no `repr`, no dump and
no error message; files that are wrong are told by name, line and rule.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from mlxd.config.values import resolve

EXPECTED_LINE = "expected name:key[:weight[:max_priority]]"
HEAVIEST = 1000.0
HIGHEST_PRIORITY = 1000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_KEY = re.compile(r"[!-9;-~]+")  # what a header can carry, without the colon
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that only its holder is to know."""

    text: str = field(repr=False)

    def matches(self, offered: str) -> bool:
        """Whether this is it, in a time that tells nothing of either."""
        # Of the digests: comparing the texts would tell their lengths.
        return hmac.compare_digest(_digest(self.text), _digest(offered))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file of keys."""

    name: str
    secret: Secret
    weight: float = 1.0  # share of the waiting line, beside the other keys'
    max_priority: int = 0


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one file."""

    file: str
    keys: tuple[ApiKey, ...]

    def find(self, offered: str) -> ApiKey | None:
        """The key with this text; every key is looked at, whichever it is."""
        found = None
        for key in self.keys:
            if key.secret.matches(offered):
                found = key
        return found


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The admin's token, alone in its file."""

    file: str
    secret: Secret


def open_to_all(*files: KeyRing | TokenFile | None) -> list[str]:
    """Those that users beyond their owner and group can read."""
    paths = [Path(each.file) for each in files if each is not None]
    return [str(path) for path in paths if path.exists() and path.stat().st_mode & stat.S_IROTH]


def parse_keys(file: str, text: str) -> KeyRing:
    """The keys of a file's text: one a line, `#` begins a comment line.

    Raises:
        ValueError: with every line that is wrong, and none of the secrets.
    """
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    keys: list[ApiKey] = []
    problems: list[str] = []
    for number, line in lines:
        try:
            keys.append(_parse_line(line))
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
    problems += [f"{file}: {problem}" for problem in _clashes(keys)]
    if not lines:
        problems.append(f"{file}: {EXPECTED_LINE}, at least once")
    if problems:
        raise ValueError("; ".join(problems))
    return KeyRing(file, tuple(keys))


def _parse_line(line: str) -> ApiKey:
    parts = line.split(":")
    if not 2 <= len(parts) <= 4:
        raise ValueError(f"{EXPECTED_LINE}; a key has no colon in it")
    name, secret, *rest = parts
    if _NAME.fullmatch(name) is None:
        raise ValueError("expected a name of letters, digits, '.', '_', '@' and '-'")
    return ApiKey(
        name,
        Secret(_checked_secret(secret)),
        _weight(rest[0]) if rest else 1.0,
        _priority(rest[1]) if len(rest) > 1 else 0,
    )


def _checked_secret(text: str) -> str:
    if not text:
        raise ValueError("the key is empty")
    if _KEY.fullmatch(text) is None:
        raise ValueError("expected a key of printable ASCII characters, without spaces or colons")
    return text


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= HEAVIEST:
        raise ValueError(f"expected a weight above 0, up to {HEAVIEST:g}")
    return weight


def _priority(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) > HIGHEST_PRIORITY:
        raise ValueError(f"expected a highest priority from 0 to {HIGHEST_PRIORITY}")
    return int(text)


def _clashes(keys: Sequence[ApiKey]) -> Iterator[str]:
    for name in _twice(key.name for key in keys):
        yield f"the name {name} stands there twice"
    for text in _twice(key.secret.text for key in keys):
        names = " and ".join(key.name for key in keys if key.secret.text == text)
        yield f"{names} have the same key"


def _twice(texts: Iterable[str]) -> list[str]:
    return [text for text, count in Counter(texts).items() if count > 1]


def _digest(text: str) -> bytes:
    # A header's bytes that are no UTF-8 arrive as surrogates.
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def read_token(file: Path) -> Secret:
    """The token that stands alone in this file. Raises ValueError."""
    token = _read(file).strip()
    if _TOKEN.fullmatch(token) is None:
        raise ValueError(f"{file}: expected one token of printable ASCII characters")
    return Secret(token)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file}: expected text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None


def _path(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError("expected the path of a file")
    return Path(resolve(value, info))


def _read_keys(value: object, info: ValidationInfo) -> KeyRing | None:
    if value is None or isinstance(value, KeyRing):
        return value
    file = _path(value, info)
    return parse_keys(str(file), _read(file))


def _read_token(value: object, info: ValidationInfo) -> TokenFile | None:
    if value is None or isinstance(value, TokenFile):
        return value
    file = _path(value, info)
    return TokenFile(str(file), read_token(file))


def _file(value: KeyRing | TokenFile | None) -> str | None:
    return None if value is None else value.file


#: A path in the file; once loaded, what the file at it says. Dumped as its path.
OptionalKeys = Annotated[
    KeyRing | None, PlainValidator(_read_keys), PlainSerializer(_file, return_type=str | None)
]
OptionalToken = Annotated[
    TokenFile | None, PlainValidator(_read_token), PlainSerializer(_file, return_type=str | None)
]
