"""Enforced output formats, as llguidance's grammars: checked here, followed in the engine.

Both processes use the same limits, so that what was accepted can be built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from mlxd.errors import BadRequest
from mlxd.nesting import levels

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
#: What the least common multiple of all `multipleOf` may be, times their number: llguidance
#: counts remainders in states, in quadratic time and unlimited. This many take 0.15 s.
MAX_REMAINDERS = 50_000
MAX_INDEX_DIGITS = 6  # of a list's index in a reference

JSON_OBJECT = {"type": "object"}


def limits() -> LLParserLimits:
    """What one grammar may cost, at most: about 20 ms in a step, and 100 MB."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - 0.1 s, before the listener is bound

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def of_schema(schema: Mapping[str, Any], param: str) -> str:
    """A grammar of the JSON documents that a schema allows.

    Takes milliseconds, of a hostile schema up to a second, and lets other threads run.
    What an engine would be stopped by is tried here: over bytes instead of the model's tokens,
    a row's grammar costs the same to build.

    Args:
        param: the field of the request that holds the schema.

    Raises:
        BadRequest: it is no schema, cannot be enforced, or is too large.
    """
    from llguidance import LLMatcher  # noqa: PLC0415 - see above

    _check_size(schema, param)
    try:
        text = LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": True},
        )
    except ValueError as error:  # a number that it has no room for
        raise BadRequest(f"{param}: {_one_line(str(error))}", param=param) from None
    if problem := LLMatcher.validate_grammar(text, limits=limits()) or _trial(text):
        raise BadRequest(f"{param}: {_one_line(problem)}", param=param)
    return text


def _trial(text: str) -> str:
    """Why no document of this grammar can be begun; empty where one can."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415 - see above

    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    return f"no document of it can be begun: {matcher.get_error()}"


def _one_line(problem: str) -> str:
    return " ".join(problem.split())[:300]


def _check_size(schema: Mapping[str, Any], param: str) -> None:
    """Refuse what could overflow a stack or keep a processor busy."""
    depth = levels(schema, MAX_NESTING)
    if depth > MAX_NESTING:
        raise BadRequest(f"{param}: nested more than {MAX_NESTING} levels deep", param=param)
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise BadRequest(
            f"{param}: {size} bytes; at most {MAX_SCHEMA_BYTES} are accepted", param=param
        )
    _check_bases(schema, param)
    _check_multiples(schema, param)
    deepest = depth
    for reference in _references(schema):
        deepest += levels(_target(schema, reference, param), MAX_NESTING)
        if deepest > MAX_LEVELS:
            raise BadRequest(
                f"{param}: more than {MAX_LEVELS} levels, with all that it refers to", param=param
            )


def _check_multiples(schema: Mapping[str, Any], param: str) -> None:
    found = [part["multipleOf"] for part in _objects(schema) if "multipleOf" in part]
    numbers = [_digits(each) for each in found if isinstance(each, int | float)]
    if math.lcm(*numbers) * len(numbers) > MAX_REMAINDERS:
        raise BadRequest(f"{param}: multipleOf is too large to be enforced", param=param)


def _digits(number: float) -> int:
    """A number's digits without its point: what its multiples are counted in."""
    if isinstance(number, int):
        return abs(number)
    return int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))


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
            case list() if _is_index(key) and int(key) < len(found):
                found = found[int(key)]
            case _:
                raise BadRequest(
                    f"{param}: the reference {reference[:80]!r} leads nowhere", param=param
                )
    return found


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) <= MAX_INDEX_DIGITS
