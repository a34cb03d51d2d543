"""What an answer has to be, in each protocol's form."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mlxd.errors import BadRequest
from mlxd.grammar import JSON_OBJECT
from mlxd.http.parts import Part
from mlxd.http.requests import JsonFormat

NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class JsonSchema(Part):
    """`response_format.json_schema`; enforced whether or not it says `strict`."""

    name: str = Field(pattern=NAME)
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class ResponseFormat(Part):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema":
            _check_required("response_format.json_schema", self.json_schema)
        return self

    @property
    def enforced(self) -> JsonFormat | None:
        """What the answer has to be; None where it is any text."""
        if self.json_schema is not None and self.type == "json_schema":
            return JsonFormat(self.json_schema.schema_, "response_format.json_schema.schema")
        return None if self.type == "text" else JsonFormat(JSON_OBJECT, "response_format")


class TextFormat(Part):
    """`text.format` of a response: a `response_format` without its inner object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=NAME)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema":
            _check_required("text.format.name", self.name)
            _check_required("text.format.schema", self.schema_)
        return self

    @property
    def enforced(self) -> JsonFormat | None:
        """What the answer has to be; None where it is any text."""
        if self.type == "json_schema":
            return JsonFormat(self.schema_ or {}, "text.format.schema")
        return None if self.type == "text" else JsonFormat(JSON_OBJECT, "text.format")

    def repeated(self) -> dict[str, Any]:
        """What a response says of it."""
        if self.type != "json_schema":
            return {"type": self.type}
        told = {"type": self.type, "name": self.name, "description": self.description}
        return told | {"schema": self.schema_, "strict": self.strict}


class OutputFormat(Part):
    """`output_config.format` of a message."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    @property
    def enforced(self) -> JsonFormat:
        """What the answer has to be."""
        return JsonFormat(self.schema_, "output_config.format.schema")


def _check_required(param: str, value: object) -> None:
    if value is None:
        raise BadRequest(f"{param} is required", param=param, code="missing_required_parameter")


def only_format(asked: JsonFormat | None, call: JsonFormat | None) -> JsonFormat | None:
    """The one format of an answer: as asked for, or that of a call that must come.

    Raises:
        BadRequest: there are two.
    """
    if asked is not None and call is not None:
        raise BadRequest("an enforced tool_choice leaves no response format", param="tool_choice")
    return call or asked
