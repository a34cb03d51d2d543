"""The settings: strict frozen types, `[defaults]` already merged into every model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from mlxd.config import values
from mlxd.config.values import (
    Alias,
    Duration,
    Host,
    Listen,
    ModelId,
    OptionalDuration,
    Origin,
    Size,
)
from mlxd.models import sources

#: Where a policy sends a request with some trait.
Answer = Literal["batch", "serial", "reject"]


def _absolute_source(text: str, info: ValidationInfo) -> str:
    match sources.parse(text):
        case sources.Folder(path) | sources.GgufFile(path):
            return values.resolve(path, info)
        case _:
            return text


def _absolute_unless_auto(text: str, info: ValidationInfo) -> str:
    return text if text == "auto" else values.resolve(text, info)


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError("expected a table of environment variables, name = 'value'")
    return variables


class Table(BaseModel):
    """A table of the file: unknown keys, wrong types and changes after loading are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ServerSettings(Table):
    """`[server]`. Durations are seconds, sizes are bytes."""

    listen: Listen = "127.0.0.1:8080"
    drain_timeout: Duration = Field(30.0, ge=0)
    max_body: Size = Field(32 * 2**20, ge=1)
    request_timeout: Duration = Field(1800.0, gt=0)
    sse_keepalive: OptionalDuration = Field(15.0, gt=0)  # None = off
    hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    origins: Annotated[tuple[Origin, ...], Field(strict=False)] = ()
    cache_dir: Annotated[str, AfterValidator(_absolute_unless_auto)] = Field("auto", min_length=1)


class LogSettings(Table):
    """`[log]`."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class SamplingSettings(Table):
    """`[models.X.sampling]`; None = the model's generation_config.json, then a built-in value."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)


class BatchSettings(Table):
    """`[models.X.batch]`."""

    width: int = Field(16, ge=1, le=1024)
    prefill_chunk: int = Field(256, ge=16)
    prefill_budget: int = Field(512, ge=16)
    queue: int = Field(256, ge=0)
    prefix_cache: Size = Field(2**30, ge=0)


class PolicySettings(Table):
    """`[models.X.policy]`: one answer for each trait of a request or model."""

    seed: Answer = "batch"
    logprobs: Answer = "batch"
    penalties: Answer = "batch"
    logit_bias: Answer = "batch"
    structured: Answer = "batch"
    adapter: Answer = "batch"
    images: Answer = "serial"
    kv_quant: Answer = "batch"
    draft: Answer = "serial"


class ModelSettings(Table):
    """`[models.X]`. Paths in `source` are absolute once loaded."""

    source: Annotated[str, AfterValidator(_absolute_source)] = Field(description=sources.EXPECTED)
    aliases: Annotated[tuple[Alias, ...], Field(strict=False)] = ()
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    context: int | None = Field(None, ge=16)  # None = the model's own
    blas: Literal["auto", "openblas", "mkl", "none"] = "auto"
    env: Annotated[dict[str, str], AfterValidator(_environment)] = Field(default_factory=dict)
    trust_remote_code: bool = False
    sampling: SamplingSettings = SamplingSettings()
    batch: BatchSettings = BatchSettings()
    policy: PolicySettings = PolicySettings()


class DefaultsSettings(Table):
    """`[defaults]`: what every model's own tables are laid over. Not kept once merged."""

    sampling: SamplingSettings = SamplingSettings()
    batch: BatchSettings = BatchSettings()
    policy: PolicySettings = PolicySettings()


def _at_least_one(models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    if not models:
        raise ValueError("expected at least one [models.ID] table")
    return models


class Settings(Table):
    """The whole configuration, `[defaults.*]` already merged into every model."""

    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    models: Annotated[dict[ModelId, ModelSettings], AfterValidator(_at_least_one)] = Field(
        description="at least one [models.ID] table"
    )
