"""`response_format`: what an answer has to be."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mlxd.errors import BadRequest
from mlxd.grammar import JSON_OBJECT
from mlxd.http.parts import Part
from mlxd.http.requests import JsonFormat


class JsonSchema(Part):
    """`response_format.json_schema`; enforced whether or not it says `strict`."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class ResponseFormat(Part):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise BadRequest(
                "response_format.json_schema is required",
                param="response_format.json_schema",
                code="missing_required_parameter",
            )
        return self

    @property
    def enforced(self) -> JsonFormat | None:
        """What the answer has to be; None where it is any text."""
        if self.json_schema is not None and self.type == "json_schema":
            return JsonFormat(self.json_schema.schema_, "response_format.json_schema.schema")
        return None if self.type == "text" else JsonFormat(JSON_OBJECT, "response_format")
