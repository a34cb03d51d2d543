"""What the bodies of all routes are made of: strict models, and errors that name the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mlxd.errors import BadRequest

MAX_STOPS = 16
# Text is held back for as long as a stop may still match, and searched at every token.
MAX_STOP_CHARS = 1024

#: Accepted, and kept nowhere.
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_kwargs(effort: Effort | None) -> dict[str, Any]:
    """What chat templates know of an effort: some its name, most whether to think at all."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class Part(BaseModel):
    """An object of a body. Null means absent, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def offered(accepted: Callable[[Any], bool], what: str) -> BeforeValidator:
    """Refuse values that mean something that is not built."""

    def check(value: object) -> object:
        if not accepted(value):
            raise ValueError(f"{what} is not offered")
        return value

    return BeforeValidator(check)


def stop_strings(value: object) -> tuple[str, ...]:
    """One stop string or several, each once; for a `BeforeValidator`."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


B = TypeVar("B", bound=Part)


def validate(kind: type[B], body: Mapping[str, Any]) -> B:
    """A body as this model.

    Raises:
        BadRequest: naming the first field that cannot be used.
    """
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        raise BadRequest(f"{param} is required", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    raise BadRequest(f"{param}: {message}", param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    """`tools[0].type` for pydantic's location."""
    first, *rest = loc
    return str(first) + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest
    )
