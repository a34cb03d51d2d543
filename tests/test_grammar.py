"""Schemas become grammars, or a client's error, and never a crash."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from mlxd.errors import BadRequest
from mlxd.grammar import MAX_LEVELS, MAX_NESTING, MAX_SCHEMA_BYTES, of_schema

PARAM = "response_format.json_schema.schema"


def refused(schema: dict[str, Any]) -> str:
    """Why the schema is refused."""
    with pytest.raises(BadRequest) as caught:
        of_schema(schema, PARAM)
    assert caught.value.param == PARAM
    return caught.value.message


def nested(levels: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def chained(count: int, levels: int = 1) -> dict[str, Any]:
    """Definitions that each refer to the next one, from so many levels down."""
    definitions: dict[str, Any] = {f"d{count}": {"type": "string"}}
    for number in range(count):
        part: dict[str, Any] = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(levels - 1):
            part = {"items": part}
        definitions[f"d{number}"] = part
    return {"$ref": "#/$defs/d0", "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"enum": ["a", 1, None]},
        {"type": "number", "multipleOf": 0.01, "maximum": 1000},
        {"type": "array", "items": {"type": "integer", "multipleOf": 3600}},
        {"oneOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]},
        {"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "boolean"}}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "boolean"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$id": "https://example.com/x", "properties": {"$id": {"type": "string"}}},
        nested(MAX_NESTING),
        chained(MAX_LEVELS - 4),
        chained(30, levels=16),
    ],
    ids=str,
)
def test_schemas_that_can_be_enforced_become_grammars(schema: dict[str, Any]) -> None:
    """Recursive ones, and what many levels of references lead to, too."""
    assert json.loads(of_schema(schema, PARAM))["grammars"]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "banana"}, "banana"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "unsatisfiable"),
        ({"$ref": "https://example.com/schema.json"}, "does not begin with"),
        ({"$ref": "#/$defs/missing"}, "leads nowhere"),
        ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "does not begin with"),
        ({"$defs": {"a": {"$id": "b", "type": "string"}}}, "$id"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "not": {"id": "b"}}, "$id"),
        (nested(MAX_NESTING + 1), "nested more than"),
        (chained(MAX_LEVELS), "levels"),
        (chained(40, levels=16), "levels"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "bytes"),
        ({"type": "number", "maximum": math.inf}, "expected value"),
        ({"type": "integer", "maximum": 10**4000}, "out of range"),
        ({"type": "integer", "multipleOf": 999_999}, "multipleOf"),
        ({"prefixItems": [{"multipleOf": 9900 + i} for i in range(9)]}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9.973}, {"multipleOf": 991}]}, "multipleOf"),
        ({"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]}, "leads nowhere"),
        ({"$ref": "#"}, "can be begun"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "can be begun"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_others_are_refused_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    """Naming the field that holds the schema."""
    assert reason in refused(schema)


@pytest.mark.parametrize("levels", [200, 5000])
def test_what_would_overflow_a_stack_is_refused_before_anybody_follows_it(levels: int) -> None:
    """Deep nesting, and long ways through definitions, each of them short."""
    assert "nested more than" in refused(nested(levels))
    properties = {
        f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(levels)
    }
    refused({"$ref": "#/$defs/d0", "$defs": properties | {f"d{levels}": {"type": "string"}}})


def test_remainders_are_limited_to_what_an_engine_builds_at_once() -> None:
    """The largest that is accepted does not hold up a batch."""
    started = time.process_time()
    of_schema({"type": "integer", "multipleOf": 49_999}, PARAM)
    assert time.process_time() - started < 2
