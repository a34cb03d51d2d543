"""Enforced output formats, as llguidance's grammars: checked here, followed in the engine.

Both processes use the same limits, so that what was accepted can be built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from mlxd.errors import BadRequest

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SCHEMA_BYTES = 64 * 1024
MAX_NESTING = 64
#: llguidance follows references by recursion, and a stack that overflows takes the
#: process with it: some 2,500 levels did. This many may lie on one path.
MAX_LEVELS = 512
#: Between two parts of a document. Without a bound, a model that likes line breaks
#: can fill its answer with them.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
MAX_LEXER_STATES = 50_000  # of one row; up to 2 kB each

JSON_OBJECT = {"type": "object"}


def limits() -> LLParserLimits:
    """What one grammar may cost, at most: about 20 ms in a step, and 100 MB."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - 0.1 s, before the listener is bound

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def of_schema(schema: Mapping[str, Any], param: str) -> str:
    """A grammar of the JSON documents that a schema allows.

    Takes milliseconds, of a hostile schema up to a second, and lets other threads run.

    Args:
        param: the field of the request that holds the schema.

    Raises:
        BadRequest: it is no schema, cannot be enforced, or is too large.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 - see above

    _check_size(schema, param)
    text = LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": True},
    )
    if problem := LLMatcher.validate_grammar(text, limits=limits()):
        raise BadRequest(f"{param}: {_one_line(problem)}", param=param)
    return text


def _one_line(problem: str) -> str:
    return " ".join(problem.split())[:300]


def _check_size(schema: Mapping[str, Any], param: str) -> None:
    """Refuse what could overflow a stack or keep a processor busy."""
    depth = _depth(schema)
    if depth > MAX_NESTING:
        raise BadRequest(f"{param}: nested more than {MAX_NESTING} levels deep", param=param)
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise BadRequest(
            f"{param}: {size} bytes; at most {MAX_SCHEMA_BYTES} are accepted", param=param
        )
    _check_bases(schema, param)
    levels = depth
    for reference in _references(schema):
        levels += _depth(_target(schema, reference, param))
        if levels > MAX_LEVELS:
            raise BadRequest(
                f"{param}: more than {MAX_LEVELS} levels, with all that it refers to", param=param
            )


def _check_bases(schema: Mapping[str, Any], param: str) -> None:
    """Refuse parts with a base of their own, in which references would mean something else."""
    old = any("draft-04" in str(part.get("$schema")) for part in _objects(schema))
    for part in _objects(schema):
        if part is not schema and isinstance(part.get("id" if old else "$id"), str):
            raise BadRequest(f"{param}: only the whole schema can have an $id", param=param)


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Every object inside, itself included."""
    pending = [value]
    while pending:
        match pending.pop():
            case Mapping() as found:
                yield found
                pending.extend(found.values())
            case list() as found:
                pending.extend(found)


def _depth(value: object) -> int:
    """Levels of objects and lists; a scalar has none. Stops counting beyond what is allowed."""
    depth, level = 0, [value]
    while depth <= MAX_NESTING and (level := [v for v in level if isinstance(v, Mapping | list)]):
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, Mapping) else v)]
    return depth


def _references(schema: Mapping[str, Any]) -> set[str]:
    """The values of every `$ref`."""
    found = (part.get("$ref") for part in _objects(schema))
    return {reference for reference in found if isinstance(reference, str)}


def _target(schema: Mapping[str, Any], reference: str, param: str) -> object:
    """What a reference points at inside its schema."""
    found: object = schema
    if reference != "#" and not reference.startswith("#/"):
        raise BadRequest(
            f"{param}: the reference {reference[:80]!r} does not begin with '#/'", param=param
        )
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        match found:
            case Mapping() if key in found:
                found = found[key]
            case list() if key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            case _:
                raise BadRequest(
                    f"{param}: the reference {reference[:80]!r} leads nowhere", param=param
                )
    return found
